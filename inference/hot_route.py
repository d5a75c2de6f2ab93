"""Completions, passed through to vLLM as they are: raw ASGI and aiohttp, since every generated token comes this way.

The body is read once to see which model it asks for; a request is let through only for the base and for versions that
are READY here (or RETIRING, since it may have been on its way). vLLM itself would answer from the base where the
model is missing, null or empty.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import aiohttp
import orjson

from bucket_grpo.inference.board import Board
from bucket_grpo.inference.supervisor import Supervisor

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
MAX_BODY_BYTES = 16 * 2**20
_ANSWERED = ("content-type", "content-length")
_FORWARDED = frozenset({b"content-type", b"accept", b"x-request-id", b"traceparent"})
# A completion takes as long as it takes; the supervisor ends an engine that makes no progress, which ends the request.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class HotRoute:
    """An ASGI app for `PATHS`. `draining` refuses new requests and lets those in flight finish."""

    def __init__(self, board: Board, supervisor: Supervisor, session: aiohttp.ClientSession) -> None:
        self._board = board
        self._supervisor = supervisor
        self._session = session
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _read_body(receive)
            model = self._admit(body)
        except Refused as refusal:
            await send_error(send, refusal.status, refusal.code, str(refusal))
            return
        except ClientGone:
            return
        self._board.request_started(model)
        try:
            await self._forward_while_wanted(scope, body, receive, send)
        finally:
            self._board.request_ended(model)

    def _admit(self, body: bytes) -> str:
        """The model that the request is for; raises `Refused`."""
        model = model_of(body)
        if self.draining:
            raise Refused(503, "draining", f"replica {self._board.replica} is shutting down: use another one")
        if self._supervisor.client is None:
            raise Refused(
                503, f"engine_{self._board.engine}", f"vLLM is {self._board.engine}: {self._board.engine_reason or ''}"
            )
        if not self._board.serves(model):
            version = self._board.versions.get(model)
            state = f"is {version.state} here" if version else "is not known here"
            reason = f" ({version.reason})" if version and version.reason else ""
            raise Refused(404, "model_not_ready", f"model {model!r} {state}{reason}")
        return model

    async def _forward_while_wanted(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Forward, but give up the work in vLLM when the client hangs up."""
        forward = asyncio.create_task(self._forward(scope, body, send))
        hung_up = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({forward, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if forward.done():
                forward.result()
        finally:
            for task in (forward, hung_up):
                task.cancel()
            await asyncio.gather(forward, hung_up, return_exceptions=True)

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        client = self._supervisor.client
        url = ("" if client is None else client.base_url) + scope["path"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name in _FORWARDED}
        headers["accept-encoding"] = "identity"  # the body is handed on byte by byte
        answering = False
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=_TIMEOUT) as response:
                kept = [(name, response.headers[name].encode()) for name in _ANSWERED if name in response.headers]
                start = {"type": "http.response.start", "status": response.status}
                await send({**start, "headers": [(name.encode(), value) for name, value in kept]})
                answering = True
                async for chunk in response.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if answering:
                return  # the server closes the connection, so that nobody takes half an answer for a whole one
            reason = self._board.engine_reason or str(error)
            await send_error(send, 503, "engine_lost", f"vLLM did not answer: {reason}")


def model_of(body: bytes) -> str:
    try:
        model = orjson.loads(body)["model"]
    except (orjson.JSONDecodeError, TypeError):
        raise Refused(400, "bad_request", "the body is not a JSON object") from None
    except KeyError:
        model = None
    if not isinstance(model, str) or not model:
        raise Refused(400, "model_missing", "'model' is missing or empty: name the base or a version")
    return model


async def _read_body(receive: Receive) -> bytes:
    chunks, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY_BYTES:
            raise Refused(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_error(send: Send, status: int, code: str, message: str) -> None:
    body = orjson.dumps({"error": {"message": message, "type": code, "code": status}})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
