"""The hot route, `POST /v1/completions`: resolve the version, place the request, retry elsewhere, write it down.

Raw ASGI. A request ends in exactly one of: an answer of vLLM's, passed on byte for byte; a refusal of ours (400, 404,
413); 503 with the reason after parking or retrying up to the bounds; or silence, if the client hung up.
"""

import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from itertools import count

from bucket_grpo.proxy.asgi import (
    BodyTooLarge,
    ClientGone,
    Receive,
    Scope,
    Send,
    error_body,
    read_body,
    refuse,
    respond,
)
from bucket_grpo.proxy.completion import BadRequest, CompletionAnswer, CompletionRequest, parse_answer, parse_request
from bucket_grpo.proxy.fleet_state import Refusal, Target, Unknown
from bucket_grpo.proxy.http_client import Answer, HttpError
from bucket_grpo.proxy.journal import Record
from bucket_grpo.proxy.router import Placement
from bucket_grpo.proxy.service import Service

WATCH_CLIENT_AFTER_S = 1.0
MIN_READ_TIMEOUT_S = 60.0
READ_TIMEOUT_FACTOR = 4.0
CLIENT_GONE = 499


class GaveUp(Exception):
    """The bounds of parking or retrying were reached; the message is the reason."""


@dataclass(slots=True)
class Exchange:
    """One request on its way. Times are of the monotonic clock."""

    id: str
    request: CompletionRequest
    started: float
    target: Target | None = None
    route: str = "none"
    replica: str | None = None
    attempts: int = 0
    failed_on: set[str] = field(default_factory=set)
    parked_s: float = 0.0
    last_failure: str | None = None
    answer: CompletionAnswer | None = None
    client_gone: bool = False
    streaming: bool = False


class Completions:
    def __init__(self, service: Service) -> None:
        self._service = service
        start = os.urandom(4).hex()
        self._ids = (f"{start}-{number}" for number in count())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(scope, receive, self._service.config.max_body_bytes)
            request = parse_request(raw)
        except ClientGone:
            return
        except BodyTooLarge:
            await refuse(send, 413, f"the body is larger than {self._service.config.max_body_bytes} bytes")
            return
        except BadRequest as error:
            await refuse(send, 400, str(error))
            return
        service = self._service
        exchange = Exchange(next(self._ids), request, time.monotonic())
        service.counters.requests += 1
        service.in_flight += 1
        watch = _ClientWatch(exchange, receive)
        status, reason = 500, None
        try:
            try:
                answer = await self._exchange(exchange, send)
                status = answer.status
            except GaveUp as error:
                status, reason = 503, str(error)
                service.counters.failed += 1
                answer = Answer(503, "application/json", error_body(503, reason))
            watch.stop()
            if not exchange.streaming:
                await respond(send, status, answer.body, answer.content_type.encode(), self._labels(exchange))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.client_gone or task is None:
                raise
            task.uncancel()
            status = CLIENT_GONE
        finally:
            watch.stop()
            service.in_flight -= 1
            self._write_down(exchange, status, reason)

    @staticmethod
    def _labels(exchange: Exchange) -> list[tuple[bytes, bytes]]:
        labels = [(b"x-request-id", exchange.id.encode())]
        if exchange.target is not None:
            labels.append((b"x-served-model", exchange.target.name.encode()))
        return labels

    async def _exchange(self, exchange: Exchange, send: Send) -> Answer:
        """Raises `GaveUp`."""
        service, fleet = self._service, self._service.fleet
        outcome = fleet.resolve(exchange.request.model)
        while isinstance(outcome, Unknown):
            await self._park(exchange, outcome.reason)
            outcome = fleet.resolve(exchange.request.model)
        if isinstance(outcome, Refusal):
            if outcome.status >= 500:
                raise GaveUp(outcome.reason)
            return Answer(outcome.status, "application/json", error_body(outcome.status, outcome.reason))
        exchange.target = outcome
        if outcome.late:
            service.counters.late += 1
        body = exchange.request.with_model(outcome.name)
        fleet.hold(outcome.number)
        try:
            while True:
                placement = await self._place(exchange, outcome)
                answer = await self._attempt(exchange, outcome, placement, body, send)
                if answer is not None:
                    return answer
        finally:
            fleet.release(outcome.number)
            service.apply()

    async def _place(self, exchange: Exchange, target: Target) -> Placement:
        """Wait for a replica that has the version READY and did not just fail this request; raises `GaveUp`."""
        service, fleet, request = self._service, self._service.fleet, exchange.request
        while True:
            if exchange.attempts >= service.config.max_attempts:
                raise GaveUp(f"{exchange.attempts} attempts failed, the last one: {exchange.last_failure}")
            candidates = fleet.ready_on(target.number)
            if exchange.failed_on and candidates:
                others = tuple(url for url in candidates if url not in exchange.failed_on)
                if not others:
                    exchange.failed_on.clear()
                    await asyncio.sleep(_backoff_s(exchange.attempts))
                    continue
                candidates = others
            if not candidates:
                version = fleet.versions.get(target.number) if target.number else None
                if version is not None and version.failure is not None:
                    raise GaveUp(f"version {target.number} failed on every replica: {version.failure}")
                await self._park(exchange, fleet.why_not_ready(target.number))
                continue
            placement = service.router.place(
                target.number or 0, request.digest, request.prompt_bytes, request.max_tokens, candidates
            )
            if exchange.attempts == 0:
                counters = service.counters
                setattr(counters, placement.route, getattr(counters, placement.route) + 1)
            else:
                service.counters.retried += 1
            exchange.route = "late" if target.late else placement.route
            exchange.attempts += 1
            return placement

    async def _park(self, exchange: Exchange, reason: str) -> None:
        """Wait for the fleet to change; raises `GaveUp` with `reason` once the bound on waiting is reached."""
        service = self._service
        left = service.config.park_timeout_s - exchange.parked_s
        if left <= 0:
            raise GaveUp(f"waited {exchange.parked_s:.0f} s for a replica: {reason}")
        if exchange.parked_s == 0:
            service.counters.parked += 1
        service.parked += 1
        began = time.monotonic()
        try:
            await service.changed.wait(left)
        finally:
            service.parked -= 1
            exchange.parked_s += max(time.monotonic() - began, 1e-3)

    async def _attempt(
        self, exchange: Exchange, target: Target, placement: Placement, body: bytes, send: Send
    ) -> Answer | None:
        """One replica's answer, or None if another must be asked."""
        service, url = self._service, placement.url
        replica = service.fleet.begin(url)
        exchange.replica = replica.name
        began, tokens, failure = time.monotonic(), 0, None
        answer: Answer | None = None
        try:
            timeout_s = self._read_timeout_s(exchange, placement)
            with service.attempt(url) as attempt:
                try:
                    if exchange.request.stream:
                        answer = await self._stream(exchange, url, body, timeout_s, send)
                    else:
                        answer = await service.agents.complete(url, body, timeout_s)
                except HttpError as error:
                    if exchange.streaming:
                        raise
                    failure = str(error)
                    if error.refused:
                        service.lost(url, failure)
                except asyncio.CancelledError:
                    if (
                        attempt.interrupted is None
                        or exchange.client_gone
                        or exchange.streaming  # half an answer is with the client: it can't be given anew
                        or attempt.task.uncancel() > 0
                    ):
                        raise
                    failure = attempt.interrupted
            if answer is not None and not exchange.streaming:
                failure, tokens = self._judge(exchange, target, url, answer)
        finally:
            seconds = time.monotonic() - began
            service.router.finish(placement, tokens=tokens, seconds=seconds)
            service.fleet.end(replica, progressed=tokens > 0)
        if failure is None:
            service.tokens.add(tokens)
            return answer
        exchange.failed_on.add(url)
        exchange.last_failure = f"{replica.name}: {failure}"
        return None

    def _judge(self, exchange: Exchange, target: Target, url: str, answer: Answer) -> tuple[str | None, int]:
        """Why the answer is of no use (None if it is one for the client), and how many tokens it holds."""
        if answer.status == 200:
            exchange.answer = parse_answer(answer.body)
            if exchange.answer is None:
                return "200 that is not JSON", 0
            useless = exchange.answer.why_useless()
            return useless, 0 if useless else exchange.answer.usage[1]
        text = answer.body[:300].decode(errors="replace")
        if answer.status == 404 and target.number is not None:
            self._service.fleet.disprove(url, target.name)
            self._service.apply()
            return f"404: {text}", 0
        if answer.status >= 500 or answer.status in (401, 403, 408, 429) or answer.status < 400:
            return f"{answer.status}: {text}", 0
        return None, 0

    def _read_timeout_s(self, exchange: Exchange, placement: Placement) -> float:
        """From the most tokens that may come, at the replica's pace; raises `GaveUp` if no time is left."""
        left = self._service.config.request_timeout_s - (time.monotonic() - exchange.started)
        if left <= 0:
            raise GaveUp(f"no answer within {self._service.config.request_timeout_s:g} s: {exchange.last_failure}")
        seconds = self._service.router.seconds_for(placement.url, exchange.request.max_tokens)
        return left if seconds is None else min(left, max(MIN_READ_TIMEOUT_S, READ_TIMEOUT_FACTOR * seconds))

    async def _stream(self, exchange: Exchange, url: str, body: bytes, timeout_s: float, send: Send) -> Answer:
        """Pass events on as they come. Once the first is out nothing can be retried: the stream just breaks off."""
        async with self._service.agents.stream(url, body, timeout_s) as response:
            if response.status != 200:
                return Answer(response.status, response.content_type, await response.read())
            exchange.streaming = True
            content_type = response.headers.get("content-type", "text/event-stream").encode()
            headers = [(b"content-type", content_type), *self._labels(exchange)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in response.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return Answer(200, response.content_type, b"")

    def _write_down(self, exchange: Exchange, status: int, reason: str | None) -> None:
        request, target, answer = exchange.request, exchange.target, exchange.answer
        usage = answer.usage if answer and status == 200 else (None, None)
        self._service.journal.write(
            Record(
                id=exchange.id,
                requested=request.model,
                served=target.name if target else request.model,
                number=target.number if target else None,
                replica=exchange.replica,
                route=exchange.route,
                retries=max(0, exchange.attempts - 1),
                late=bool(target and target.late),
                status=status,
                prompt_sha256=request.digest.hex(),
                latency_s=time.monotonic() - exchange.started,
                prompt=request.prompt,
                output=answer.output if answer and status == 200 else None,
                logprobs=answer.logprobs if answer and status == 200 else None,
                prompt_tokens=usage[0],
                completion_tokens=usage[1],
                finish_reason=answer.finish_reason if answer and status == 200 else None,
                reason=reason or exchange.last_failure,
            )
        )


class _ClientWatch:
    """Cancels a request whose client hangs up. Only long requests are watched: a task for each would cost too much."""

    def __init__(self, exchange: Exchange, receive: Receive) -> None:
        self._exchange, self._receive = exchange, receive
        self._main = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_CLIENT_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._exchange.client_gone = True
        if self._main is not None:
            self._main.cancel()

    def stop(self) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()


def _backoff_s(attempts: int) -> float:
    """Before the same replicas are asked again; with jitter, so that many requests don't come back at once."""
    return min(0.25 * 2**attempts, 5.0) * random.uniform(0.5, 1.0)
