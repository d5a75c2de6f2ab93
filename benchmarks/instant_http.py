"""The two ends of a proxy benchmark, as cheap as Python allows: an upstream that answers at once and a load generator.

Bare asyncio protocols: what they cost is what a measurement can't see.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

TEMPLATE = list(range(1000, 1023))  # 23 tokens that every prompt begins with
PROMPT_TOKENS = 340  # about 2 KB of JSON
ANSWER_TOKENS = 110  # about 1.6 KB of JSON with its logprobs
GROUP = 8


def completion_answer() -> bytes:
    choice = {
        "index": 0,
        "text": "",
        "token_ids": [12345] * ANSWER_TOKENS,
        "logprobs": {"token_logprobs": [-0.125] * ANSWER_TOKENS},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS}
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}).encode()


class InstantUpstream(asyncio.Protocol):
    """One replica: an agent's status and a vLLM that answers every completion after `delay_s`."""

    def __init__(self, name: str, versions: list[str], delay_s: float) -> None:
        self._delay_s = delay_s
        self._completion = _response(completion_answer())
        status = {
            "seq": 1,
            "replica": name,
            "boot_id": "1",
            "engine_epoch": 1,
            "engine": "ready",
            "base_model": "tiny",
            "dtype": "float32",
            "versions": {version: {"state": "READY"} for version in versions},
        }
        self._status = _response(json.dumps(status).encode())
        self._models = _response(
            json.dumps({"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]}).encode()
        )
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while (end := buffer.find(b"\r\n\r\n")) >= 0:
            length = _content_length(buffer, end)
            if len(buffer) < end + 4 + length:
                break
            self._answer(buffer[: buffer.index(b"\r\n")])
            buffer = buffer[end + 4 + length :]
        self._buffer = buffer

    def _answer(self, request_line: bytes) -> None:
        loop = asyncio.get_running_loop()
        if request_line.startswith(b"POST"):
            if self._delay_s:
                loop.call_later(self._delay_s, self._send, self._completion)
            else:
                self._send(self._completion)
        elif b"/agent/status" in request_line:
            wait_s = 0.0 if b"wait=0" in request_line else 5.0
            loop.call_later(wait_s, self._send, self._status)
        elif b"/agent/" in request_line:
            self._send(self._status)
        else:
            self._send(self._models)

    def _send(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _content_length(buffer: bytes, end: int) -> int:
    head = buffer[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return 0
    line_end = head.find(b"\r\n", at)
    return int(head[at + 15 : line_end if line_end >= 0 else end])


def completion_requests(model: str, host: str) -> Iterator[bytes]:
    """Endless raw requests: groups of 8 with a prompt that has never been sent before."""
    body = {
        "model": model,
        "prompt": [*TEMPLATE, 99999, 99998, *([12345] * (PROMPT_TOKENS - len(TEMPLATE) - 2))],
        "max_tokens": 3000,
        "temperature": 1.0,
        "top_p": 1.0,
        "n": 1,
        "return_token_ids": True,
        "logprobs": 0,
        "seed": 1234567890123,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    group = 0
    while True:
        unique = whole.replace(b"99999", b"%05d" % (10000 + group // 80000)).replace(
            b"99998", b"%05d" % (10000 + group % 80000)
        )
        for _ in range(GROUP):
            yield unique
        group += 1


@dataclass
class Measured:
    """Latencies in seconds of what was asked and answered after `since`; `count` has the warm-up's answers, too."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: int = 0
    count: int = 0
    since: float = math.inf

    @property
    def rps(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, q: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class LoadConnection(asyncio.Protocol):
    """Sends the next request as soon as the last was answered."""

    def __init__(self, requests: Iterator[bytes], measured: Measured) -> None:
        self._requests, self._measured = requests, measured
        self._buffer = b""
        self.stopped = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopped:
            self._measured.errors += 1

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        end = buffer.find(b"\r\n\r\n")
        if end < 0 or not self._complete(buffer, end):
            self._buffer = buffer
            return
        self._buffer = b""
        now = time.perf_counter()
        if buffer[9:12] == b"200":
            self._measured.count += 1
            if self._sent_at >= self._measured.since:
                self._measured.latencies.append(now - self._sent_at)
        else:
            self._measured.errors += 1
        if not self.stopped:
            self._next()

    @staticmethod
    def _complete(buffer: bytes, end: int) -> bool:
        if b"chunked" in buffer[:end].lower():
            return buffer.endswith(b"0\r\n\r\n")
        return len(buffer) >= end + 4 + _content_length(buffer, end)

    def _next(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(next(self._requests))

    def close(self) -> None:
        self.stopped = True
        self._transport.abort()


async def drive(port: int, model: str, in_flight: int, seconds: float, warmup_s: float = 2.0) -> Measured:
    """Keep `in_flight` requests at 127.0.0.1:`port` going for `seconds`, after a warm-up that does not count."""
    loop = asyncio.get_running_loop()
    measured = Measured()
    requests = completion_requests(model, f"127.0.0.1:{port}")
    connections: list[LoadConnection] = []
    for _ in range(in_flight):
        _, connection = await loop.create_connection(lambda: LoadConnection(requests, measured), "127.0.0.1", port)
        connections.append(connection)
    await asyncio.sleep(warmup_s)
    measured.since = time.perf_counter()
    await asyncio.sleep(seconds)
    measured.seconds = time.perf_counter() - measured.since
    for connection in connections:
        connection.close()
    await asyncio.sleep(0.2)
    return measured
