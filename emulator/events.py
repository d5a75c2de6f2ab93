"""The feed of a bucket's changes as server-sent events: the cheapest way to wait for a file.

A stream first replays what happened after its resume point, then says `ready`, then follows. `changes` carries a cursor
that resumes strictly after its batch. Where the replay buffer does not reach back far enough it says `reset`: the
reader must list the bucket anew. `reconnect` ends a stream that the server wants closed.
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from bucket_grpo.emulator.hub_database import Database
from bucket_grpo.emulator.hub_errors import HubError

CURSOR_MARK = "c"
BATCH = 500


class Content(NamedTuple):
    """What a change put there. `mtime` is in seconds since 1970."""

    xet_hash: str
    size: int
    mtime: float | None


class ResumePoint(NamedTuple):
    """Where a reader wants to go on: after a sequence number, after an instant (seconds since 1970), or just live."""

    after: int | None = None
    since: float | None = None


def read_resume_point(cursor: str | None, since: str | None) -> ResumePoint:
    """Parse the query of `/events`. Raises 400 for a cursor or instant that cannot be read."""
    if cursor:
        if not cursor.startswith(CURSOR_MARK) or not cursor[1:].isdecimal():
            raise HubError(400, f"cursor {cursor!r} is not one that this feed gave out")
        return ResumePoint(after=int(cursor[1:]))
    if since:
        try:
            instant = datetime.fromisoformat(since)
        except ValueError as error:
            raise HubError(400, f"since={since!r} is not an ISO 8601 instant") from error
        return ResumePoint(since=(instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp())
    return ResumePoint()


def iso(at: float | None) -> str | None:
    """Seconds since 1970 as the Hub writes instants: UTC with milliseconds and a Z."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def frame(event: str, payload: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(payload)}\n\n".encode()


class ChangeLog:
    """The last `buffer` changes of each bucket, numbered over all buckets in the order of their commits."""

    def __init__(self, database: Database, buffer: int = 10_000) -> None:
        self._database = database
        self._buffer = buffer

    def append(self, connection: sqlite3.Connection, bucket: int, op: str, path: str, content: Content | None) -> None:
        """Note a change inside the transaction that makes it, and forget what falls out of the buffer."""
        connection.execute(
            "INSERT INTO changes (bucket, op, path, xet_hash, size, mtime, at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (bucket, op, path, *(content or (None, None, None)), time.time()),
        )
        oldest = connection.execute(
            "SELECT seq FROM changes WHERE bucket = ? ORDER BY seq DESC LIMIT 1 OFFSET ?", (bucket, self._buffer)
        ).fetchone()
        if oldest is not None:
            connection.execute("DELETE FROM changes WHERE bucket = ? AND seq <= ?", (bucket, oldest[0]))
            connection.execute("UPDATE buckets SET forgotten = ? WHERE id = ?", (oldest[0], bucket))

    def after(self, bucket: int, position: int) -> list[sqlite3.Row]:
        """The next changes behind `position`, at most a batch."""
        return self._database.rows(
            "SELECT * FROM changes WHERE bucket = ? AND seq > ? ORDER BY seq LIMIT ?", bucket, position, BATCH
        )

    def position(self, bucket: int, resume: ResumePoint) -> int | None:
        """The number to go on behind; None where changes behind the resume point were forgotten."""
        row = self._database.row("SELECT forgotten FROM buckets WHERE id = ?", bucket)
        forgotten = row[0] if row else 0
        if resume.after is not None:
            return resume.after if resume.after >= forgotten else None
        if resume.since is not None:
            seen = self._last(bucket, resume.since)
            return seen if seen or not forgotten else None
        return self._last(bucket, time.time()) or forgotten

    def _last(self, bucket: int, at: float) -> int:
        row = self._database.row("SELECT COALESCE(MAX(seq), 0) FROM changes WHERE bucket = ? AND at <= ?", bucket, at)
        assert row is not None
        position: int = row[0]
        return position

    def follows(self, bucket: int) -> bool:
        return self._database.row("SELECT 1 FROM buckets WHERE id = ?", bucket) is not None


class Feed:
    """The open streams. `ring` and `close` may be called from any thread; streams run in one event loop.

    `session_s` is how long one stream lives at most, `ping_s` how often a silent one shows that it is alive.
    """

    def __init__(self, log: ChangeLog, session_s: float = 1800, ping_s: float = 30) -> None:
        self._log = log
        self._session_s = session_s
        self._ping_s = ping_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._closing = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def ring(self) -> None:
        """Something changed: every open stream looks again."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def close(self) -> None:
        """Tell every open stream to reconnect."""
        self._closing = True
        self.ring()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def stream(self, bucket: int, resume: ResumePoint) -> AsyncIterator[bytes]:
        """The frames of one session for the bucket with this row number."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._session_s
        position = self._log.position(bucket, resume)
        if position is None:
            yield frame("reset", {"reason": "the resume point is older than the replay buffer"})
            return
        ready = False
        while True:
            changed = self._changed
            while rows := self._log.after(bucket, position):
                position = rows[-1]["seq"]
                yield frame("changes", {"cursor": cursor(position), "changes": [_change(row) for row in rows]})
            if not ready:
                ready = True
                yield frame("ready", {"cursor": cursor(position)})
            if self._closing or loop.time() >= ends_at or not self._log.follows(bucket):
                yield frame("reconnect", {"cursor": cursor(position)})
                return
            try:
                await asyncio.wait_for(changed.wait(), min(self._ping_s, ends_at - loop.time()))
            except TimeoutError:
                yield b": ping\n\n"


def cursor(position: int) -> str:
    return f"{CURSOR_MARK}{position}"


def _change(row: sqlite3.Row) -> dict[str, Any]:
    change = {"path": row["path"], "op": row["op"]}
    if row["op"] != "delete":
        change |= {"size": row["size"], "xetHash": row["xet_hash"], "uploadedAt": iso(row["at"])}
        if row["mtime"] is not None:
            change["mtime"] = iso(row["mtime"])
    return change
