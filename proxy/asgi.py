"""The few things about ASGI that the hot route and the gate need, without a framework's cost per request."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class BodyTooLarge(Exception):
    """The body is longer than the limit; what was read of it is thrown away."""


class ClientGone(Exception):
    """The client hung up before it had sent its body."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body; raises `BodyTooLarge` or `ClientGone`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or int(value) > limit):
            raise BodyTooLarge
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body"):
        if len(body) > limit:
            raise BodyTooLarge
        return body
    parts, size = [body], len(body)
    while message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise BodyTooLarge
    if message["type"] == "http.disconnect":
        raise ClientGone
    return b"".join(parts)


async def respond(send: Send, status: int, body: bytes, content_type: bytes, extra: Headers | None = None) -> None:
    headers: Headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if extra:
        headers += extra
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(status: int, reason: str) -> bytes:
    """OpenAI's error shape, as vLLM uses it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return orjson.dumps({"error": {"message": reason, "type": kind, "code": status}})


async def refuse(send: Send, status: int, reason: str, extra: Headers | None = None) -> None:
    await respond(send, status, error_body(status, reason), b"application/json", extra)
