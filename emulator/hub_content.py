"""Bytes on their way out: single ranges, and the faults that slow them down or cut them off."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.hub_faults import fault_for


def read_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Bytes `[start, end)` that a Range header asks of an object of `size` bytes; None where it asks for all of it.

    Raises 416 for a range that starts behind the end, or that is not a single range of bytes.
    """
    if not header:
        return None
    unit, _, spec = header.partition("=")
    first, dash, last = spec.partition("-")
    if unit != "bytes" or not dash or not (first or last) or not (first + last).isdecimal():
        raise _unsatisfiable(header, size)
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise _unsatisfiable(header, size)
    return start, end


def _unsatisfiable(header: str, size: int) -> HubError:
    return HubError(
        416, f"Range {header!r} of {size} bytes cannot be satisfied", None, {"Content-Range": f"bytes */{size}"}
    )


def send(
    request: Request, size: int, read: Callable[[int, int], Iterator[bytes]], headers: dict[str, str] | None = None
) -> Response:
    """Answer a GET or HEAD of an object of `size` bytes, of which `read(start, end)` yields pieces."""
    if fault := fault_for(request, "truncate"):
        size = min(size, fault.keep_bytes)
    asked = read_range(request.headers.get("range"), size)
    start, end = asked or (0, size)
    headers = {"Accept-Ranges": "bytes", "Content-Length": str(end - start), **(headers or {})}
    if asked:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    pieces = iterate_in_threadpool(read(start, end) if request.method == "GET" else iter(()))
    if slow := fault_for(request, "slow_read"):
        pieces = _throttled(pieces, slow.bytes_per_s)
    return StreamingResponse(pieces, 206 if asked else 200, headers, media_type="application/octet-stream")


async def _throttled(pieces: AsyncIterator[bytes], bytes_per_s: float) -> AsyncIterator[bytes]:
    async for piece in pieces:
        await asyncio.sleep(len(piece) / bytes_per_s)
        yield piece
