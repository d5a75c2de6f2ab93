"""What can go wrong on the way to the Hub, on demand: each fault says which requests it hits and how many of them.

A fault is taken by the first matching requests and is then spent. The set lives in memory: a restarted server has none.
"""

import asyncio
import math
import threading
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bucket_grpo.emulator.hub_errors import HubError

Kind = Literal[
    "status", "delay", "lose_answer", "drop_commit", "fail_operations", "hide", "disk_full", "slow_read", "truncate"
]


class Fault(BaseModel):
    """One fault. `method` and the glob `path` choose requests, `times` says how many are hit (null: all).

    kind:
      status           answer `status` at once (with `retry_after_s`, if given, as Retry-After and RateLimit headers)
      delay            wait `delay_s` before the request is handled
      lose_answer      handle the request, then answer 502: the client can't know that it was done
      drop_commit      a batch answers success and does nothing
      fail_operations  the first `operations` of a batch whose path matches `operation_path` fail; the answer is 200
      hide             a batch answers success; operations on `operation_path` show only after `delay_s`
      disk_full        an upload to the CAS is refused with 507
      slow_read        content goes out at `bytes_per_s`
      truncate         content ends after `keep_bytes`, as if the object were that short
    """

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    method: str = "*"
    path: str = "*"
    times: int | None = Field(default=1, ge=1)
    status: int = Field(default=503, ge=400, le=599)
    retry_after_s: float | None = None
    delay_s: float = Field(default=1.0, ge=0)
    operations: int = Field(default=1, ge=1)
    operation_path: str = "*"
    bytes_per_s: float = Field(default=1_000_000, gt=0)
    keep_bytes: int = Field(default=0, ge=0)
    hits: int = 0

    def matches(self, method: str, path: str) -> bool:
        spent = self.times is not None and self.hits >= self.times
        return not spent and fnmatchcase(method, self.method) and fnmatchcase(path, self.path)

    def hits_operation(self, path: str) -> bool:
        return fnmatchcase(path, self.operation_path)


class FaultBook:
    """The faults in force. Safe from several threads."""

    def __init__(self, faults: list[Fault] | None = None) -> None:
        self._lock = threading.Lock()
        self._faults = list(faults or [])

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault.model_copy(update={"hits": 0}))

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def in_force(self) -> list[Fault]:
        with self._lock:
            return [fault.model_copy() for fault in self._faults]

    def take(self, kind: Kind, method: str, path: str) -> Fault | None:
        """The first fault of this kind that hits the request, counted as one hit."""
        with self._lock:
            for fault in self._faults:
                if fault.kind == kind and fault.matches(method, path):
                    fault.hits += 1
                    return fault
        return None


def fault_for(request: Request, kind: Kind) -> Fault | None:
    book: FaultBook = request.app.state.hub.faults
    return book.take(kind, request.method, request.url.path)


class FaultMiddleware:
    """Applies the faults that need no knowledge of the route. The control routes under `/_emulator` are never hit."""

    def __init__(self, app: ASGIApp, book: FaultBook) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/_emulator"):
            return await self._app(scope, receive, send)
        method, path = scope["method"], scope["path"]
        if fault := self._book.take("delay", method, path):
            await asyncio.sleep(fault.delay_s)
        if fault := self._book.take("status", method, path):
            return await _refusal(fault).response()(scope, receive, send)
        if self._book.take("lose_answer", method, path):
            await self._app(scope, receive, _swallow)
            lost = HubError(502, "Bad gateway: the answer was lost (fault on demand)")
            return await lost.response()(scope, receive, send)
        return await self._app(scope, receive, send)


async def _swallow(message: Message) -> None:
    return None


def _refusal(fault: Fault) -> HubError:
    headers = {}
    if fault.retry_after_s is not None:
        seconds = math.ceil(fault.retry_after_s)
        headers = {"Retry-After": str(seconds), "RateLimit": f'"api";r=0;t={seconds}'}
    return HubError(fault.status, f"Fault on demand: {fault.status}", None, headers)
