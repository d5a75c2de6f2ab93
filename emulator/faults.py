"""Faults on demand: what a bucket may do to a mount, switched on by a flag or, at run time, by a JSON file.

Most faults hit a `Ratio`: `"2/5"` is the first two of every five, `"3"` the first three only, `"0"` none. Seconds are
real ones: a profile's time scale does not touch them.
"""

import errno
import fnmatch
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bucket_grpo.emulator.backends import Backend, Listing, Operation, Reader, Stat


def _check_ratio(text: str) -> str:
    hits, _, of = text.partition("/")
    if not hits.isdigit() or (of and (not of.isdigit() or int(of) < max(1, int(hits)))):
        raise ValueError(f"{text!r} is not of the form '3' (the first three) or '2/5' (two of every five)")
    return text


Ratio = Annotated[str, AfterValidator(_check_ratio)]


def hit(ratio: str, seen: int) -> bool:
    """Whether the event after `seen` earlier ones is hit."""
    hits, _, of = ratio.partition("/")
    return (seen % int(of) if of else seen) < int(hits)


class Faults(BaseModel):
    """All faults; the default is none. A field that is not listed here is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    match: str = Field(default="*", description="only keys that match this glob are touched")
    drop_commits: Ratio = Field(default="0", description="commits that are acknowledged and never applied")
    fail_commits: Ratio = Field(default="0", description="commits that fail as a whole")
    partial_batches: Ratio = Field(
        default="0", description="operations of a commit that are left out, though it is acknowledged"
    )
    hide_commits: Ratio = Field(
        default="0", description="commits that are acknowledged and applied after `hide_s` only"
    )
    hide_s: float = Field(default=10.0, ge=0, description="later commits show first meanwhile")
    stale_contents: Ratio = Field(default="0", description="opens that get the content before the last change")
    delay_commits_s: float = Field(default=0.0, ge=0)
    op_gap_s: float = Field(default=0.0, ge=0, description="time between the operations of one commit")
    reverse_batches: bool = Field(default=False, description="apply a commit's operations last to first")
    truncate_objects_to: int | None = Field(
        default=None, ge=0, description="uploads lose everything after this many bytes"
    )
    disk_full: Literal["staging", "bucket"] | None = Field(
        default=None, description="ENOSPC on write(), or on the upload"
    )
    fail_reads: Ratio = Field(default="0", description="reads that end in EIO")
    read_delay_s: float = Field(
        default=0.0, ge=0, description="added to each read that reaches the mount (128 KiB or less)"
    )
    request_delay_s: float = Field(default=0.0, ge=0, description="added to each HEAD and each listing")

    def hits_key(self, key: str) -> bool:
        return fnmatch.fnmatch(key, self.match)


def parse_faults(settings: Iterable[str]) -> Faults:
    """`name=value` settings to faults; `ValueError` says which setting is wrong and why."""
    raw: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"fault {setting!r} is not of the form name=value")
        raw[name] = value
    return _validated(raw)


def _validated(raw: object) -> Faults:
    try:
        return Faults.model_validate(raw)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'faults'}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{wrong}. Known faults: {', '.join(Faults.model_fields)}") from None


class FaultControl:
    """The faults that hold now, and how often each of them had its chance.

    If `path` is given, its JSON object (the fields of `Faults`) replaces the faults whenever the file changes; removing
    the file ends all of them. Counters start anew with each change.
    """

    def __init__(self, faults: Faults | None = None, path: Path | None = None) -> None:
        self._faults = faults or Faults()
        self._path = path
        self._read_from: tuple[int, int] | None = None
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def now(self) -> Faults:
        with self._lock:
            self._reload()
            return self._faults

    def hits(self, fault: str, key: str) -> bool:
        """Whether this event on `key` is hit by the ratio fault named `fault`; counts the event."""
        faults = self.now()
        if not faults.hits_key(key):
            return False
        with self._lock:
            seen = self._seen[fault]
            self._seen[fault] += 1
        return hit(getattr(faults, fault), seen)

    def _reload(self) -> None:
        if self._path is None:
            return
        try:
            status = self._path.stat()
        except FileNotFoundError:
            if self._read_from is not None:
                self._faults, self._read_from = Faults(), None
                self._seen.clear()
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._read_from:
            return
        self._read_from = stamp
        try:
            self._faults = _validated(json.loads(self._path.read_text()))
        except ValueError as error:
            # A half-written or wrong file must not end the mount; the earlier faults go on.
            print(f"faults in {self._path} are not used: {error}", file=sys.stderr, flush=True)
            return
        self._seen.clear()


class FaultyReader:
    def __init__(self, reader: Reader, key: str, control: FaultControl, sleep: Callable[[float], None]) -> None:
        self._reader, self._key, self._control, self._sleep = reader, key, control, sleep

    def read(self, offset: int, size: int) -> bytes:
        faults = self._control.now()
        if faults.read_delay_s and faults.hits_key(self._key):
            self._sleep(faults.read_delay_s)
        if self._control.hits("fail_reads", self._key):
            raise OSError(errno.EIO, "fault: fail_reads", self._key)
        return self._reader.read(offset, size)

    def close(self) -> None:
        self._reader.close()


class FaultyBackend:
    """A backend with the faults of `control` in front of it."""

    def __init__(self, backend: Backend, control: FaultControl, sleep: Callable[[float], None] = time.sleep) -> None:
        self._backend, self._control, self._sleep = backend, control, sleep
        self._shown: dict[str, tuple[Stat, Stat]] = {}  # key → the content before the last change, and the present one

    def stat(self, key: str) -> Stat | None:
        self._slow_request(key)
        found = self._backend.stat(key)
        if found is not None:
            before, now = self._shown.get(key, (found, found))
            self._shown[key] = (before, found) if found.etag == now.etag else (now, found)
        return found

    def list_folder(self, folder: str) -> Listing:
        self._slow_request(folder)
        return self._backend.list_folder(folder)

    def open(self, stat: Stat) -> Reader:
        if stat.key in self._shown and self._control.hits("stale_contents", stat.key):
            stat = self._shown[stat.key][0]
        return FaultyReader(self._backend.open(stat), stat.key, self._control, self._sleep)

    def upload(self, staged: Path, key: str) -> Stat:
        faults = self._control.now()
        if not faults.hits_key(key):
            return self._backend.upload(staged, key)
        if faults.disk_full == "bucket":
            raise OSError(errno.ENOSPC, "fault: disk_full=bucket", key)
        if faults.truncate_objects_to is None:
            return self._backend.upload(staged, key)
        with tempfile.NamedTemporaryFile() as short:
            with staged.open("rb") as whole:
                short.write(whole.read(faults.truncate_objects_to))
            short.flush()
            return self._backend.upload(Path(short.name), key)

    def commit(self, operations: Sequence[Operation]) -> list[Operation]:
        faults = self._control.now()
        touched = next((op.key for op in operations if faults.hits_key(op.key)), None)
        if touched is None:
            return self._backend.commit(operations)
        if faults.delay_commits_s:
            self._sleep(faults.delay_commits_s)
        if self._control.hits("fail_commits", touched):
            raise OSError(errno.EIO, "fault: fail_commits", touched)
        if self._control.hits("drop_commits", touched):
            return []
        if self._control.hits("hide_commits", touched):
            threading.Timer(faults.hide_s, self._backend.commit, (operations,)).start()
            return []
        left_out = [op for op in operations if self._control.hits("partial_batches", op.key)]
        applied = [op for op in operations if op not in left_out]
        if faults.reverse_batches:
            applied.reverse()
        if not faults.op_gap_s:
            return left_out + self._backend.commit(applied)
        failed = left_out
        for number, op in enumerate(applied):
            if number:
                self._sleep(faults.op_gap_s)
            failed = failed + self._backend.commit([op])
        return failed

    def _slow_request(self, key: str) -> None:
        faults = self._control.now()
        if faults.request_delay_s and faults.hits_key(key):
            self._sleep(faults.request_delay_s)
