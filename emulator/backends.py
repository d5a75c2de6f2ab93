"""What a mount needs from a bucket, and a bucket that is a folder on this machine.

Keys are relative paths with `/`. An object is replaced as a whole or not at all, a batch of operations is not a
transaction: readers may see any prefix of it. `Stat.etag` names the content: a reader that opened it goes on reading
the same bytes after the key was overwritten or deleted, as with the Hub's content-addressed storage.
"""

import errno
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PRIVATE_FOLDER = ".emulator"
PIN_S = 30.0  # longer than a mount goes without asking: what it opens it has asked for since
MAX_PINS = 256


@dataclass(frozen=True)
class Stat:
    """An object as a listing or a HEAD shows it. `mtime` is in seconds since 1970."""

    key: str
    size: int
    mtime: float
    etag: str


@dataclass(frozen=True)
class Listing:
    """The immediate children of a folder; a folder exists only as the prefix of some object's key."""

    files: tuple[Stat, ...] = ()
    folders: tuple[str, ...] = ()  # full keys

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)


@dataclass(frozen=True)
class Add:
    """Make `key` show the content `etag`, which was uploaded or is the present content of `source`."""

    key: str
    etag: str
    source: str | None = None


@dataclass(frozen=True)
class Delete:
    key: str


Operation = Add | Delete


class Reader(Protocol):
    """One object's bytes, unchanged until closed."""

    def read(self, offset: int, size: int) -> bytes: ...
    def close(self) -> None: ...


class Backend(Protocol):
    """Errors are `OSError`. Methods may be called from several threads."""

    def stat(self, key: str) -> Stat | None:
        """The object, or None if there is none (also if `key` is a folder)."""

    def list_folder(self, folder: str) -> Listing: ...

    def open(self, stat: Stat) -> Reader:
        """Read the content that `stat` names, whatever its key shows by now; EIO once it is gone for good."""

    def upload(self, staged: Path, key: str) -> Stat:
        """Bring a local file's bytes to the bucket. `key` shows them only after a `commit`."""

    def commit(self, operations: Sequence[Operation]) -> list[Operation]:
        """Apply in order; returns what could not be applied (a Hub answers 200 then, too)."""


@dataclass
class FileReader:
    descriptor: int

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def close(self) -> None:
        os.close(self.descriptor)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _stat_of(key: str, status: os.stat_result) -> Stat:
    return Stat(key, status.st_size, status.st_mtime, _etag(status))


class FolderBackend:
    """Objects as files under `root`, shared by any number of processes.

    A commit is a rename on the disk of `root`, so a reader sees the old bytes or the new, never a mix. Uploads wait in
    `root/.emulator`, which no listing shows. What `stat` returned stays open for a while, so that it can be read
    after it was replaced, also by something that is no mount.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._uploads = self._root / PRIVATE_FOLDER / "uploads"
        self._uploads.mkdir(parents=True, exist_ok=True)
        self._pins: dict[str, tuple[int, float]] = {}  # etag → descriptor, when it was last asked for
        self._lock = threading.Lock()

    def stat(self, key: str) -> Stat | None:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            os.close(descriptor)
            return None
        self._pin(_etag(status), descriptor)
        return _stat_of(key, status)

    def list_folder(self, folder: str) -> Listing:
        files, folders = [], []
        try:
            names = os.listdir(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return Listing()
        for name in names:
            key = f"{folder}/{name}" if folder else name
            try:
                status = self._path(key).stat()
            except FileNotFoundError:
                continue  # deleted since listdir saw it
            if not stat.S_ISDIR(status.st_mode):
                files.append(_stat_of(key, status))
            elif name != PRIVATE_FOLDER and _holds_a_file(self._path(key)):
                folders.append(key)
        return Listing(tuple(files), tuple(folders))

    def open(self, stat: Stat) -> FileReader:
        with self._lock:
            if pin := self._pins.get(stat.etag):
                return FileReader(os.dup(pin[0]))
        try:
            descriptor = os.open(self._path(stat.key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = -1
        if descriptor >= 0:
            if _etag(os.fstat(descriptor)) == stat.etag:
                return FileReader(descriptor)
            os.close(descriptor)
        raise OSError(errno.EIO, f"content {stat.etag} was replaced too long ago", stat.key)

    def upload(self, staged: Path, key: str) -> Stat:
        target = self._uploads / uuid.uuid4().hex
        try:
            shutil.copyfile(staged, target)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        status = target.stat()
        # The name lets `commit`, which knows only the etag, find it.
        target.rename(self._uploads / _etag(status))
        return _stat_of(key, status)

    def commit(self, operations: Sequence[Operation]) -> list[Operation]:
        return [op for op in operations if not (self._add(op) if isinstance(op, Add) else self._delete(op.key))]

    def _add(self, op: Add) -> bool:
        uploaded = self._uploads / op.etag
        if op.source is not None:
            link = self._uploads / uuid.uuid4().hex
            try:
                os.link(self._path(op.source), link)
            except FileNotFoundError:
                return False
            uploaded = link
        target = self._path(op.key)
        while True:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                uploaded.rename(target)
            except FileNotFoundError:
                # Another process deleted the folder's last object, and the folder with it, in between.
                if uploaded.exists():
                    continue
                return False
            return True

    def _delete(self, key: str) -> bool:
        path = self._path(key)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        for folder in path.parents:
            if folder == self._root:
                break
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                    raise
                break
        return True

    def _pin(self, etag: str, descriptor: int) -> None:
        now = time.monotonic()
        with self._lock:
            if old := self._pins.pop(etag, None):
                os.close(old[0])
            self._pins[etag] = (descriptor, now)
            while len(self._pins) > MAX_PINS or now - self._oldest_pin() > PIN_S:
                os.close(self._pins.pop(next(iter(self._pins)))[0])

    def _oldest_pin(self) -> float:
        return next(iter(self._pins.values()))[1]

    def _path(self, key: str) -> Path:
        path = self._root / key
        if ".." in Path(key).parts or Path(key).is_absolute():
            raise OSError(errno.EINVAL, f"key {key!r} leaves the bucket")
        return path


def _holds_a_file(folder: Path) -> bool:
    return any(files for _, _, files in os.walk(folder))


def open_backend(source: str, endpoint: str | None = None) -> Backend:
    """A folder's path, or a bucket id (`ns/name`, perhaps with a folder behind it) if `endpoint` names its Hub."""
    if endpoint is None:
        return FolderBackend(Path(source).absolute())
    from bucket_grpo.emulator.mount_hub import HubBackend

    return HubBackend(source, endpoint=endpoint, token=os.environ.get("HF_TOKEN"))
