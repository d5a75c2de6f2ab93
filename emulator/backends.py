"""What a mount needs from a bucket, and a bucket that is a folder on this machine.

Keys are relative paths with `/`. An object is replaced as a whole or not at all, a batch of operations is not a
transaction: readers may see any prefix of it. `Stat.etag` names the content: a reader that opened it goes on reading
the same bytes after the key was overwritten or deleted, as with the Hub's content-addressed storage.
"""

import errno
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PRIVATE_FOLDER = ".emulator"
KEEP_REPLACED_S = 120.0


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

    A commit is a rename on the disk of `root`, so a reader sees the old bytes or the new, never a mix. Uploads and
    replaced contents wait in `root/.emulator`, which no listing shows.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._uploads = self._root / PRIVATE_FOLDER / "uploads"
        self._replaced = self._root / PRIVATE_FOLDER / "replaced"
        for folder in (self._uploads, self._replaced):
            folder.mkdir(parents=True, exist_ok=True)

    def stat(self, key: str) -> Stat | None:
        try:
            status = self._path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _stat_of(key, status) if not _is_folder(status) else None

    def list_folder(self, folder: str) -> Listing:
        files, folders = [], []
        try:
            with os.scandir(self._path(folder)) as entries:
                for entry in entries:
                    key = f"{folder}/{entry.name}" if folder else entry.name
                    if entry.name == PRIVATE_FOLDER:
                        continue
                    if entry.is_dir():
                        if _holds_a_file(entry.path):
                            folders.append(key)
                    elif stat := self.stat(key):  # None: deleted since scandir saw it
                        files.append(stat)
        except (FileNotFoundError, NotADirectoryError):
            return Listing()
        return Listing(tuple(files), tuple(folders))

    def open(self, stat: Stat) -> FileReader:
        for path in (self._path(stat.key), self._replaced / stat.etag):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            if _etag(os.fstat(descriptor)) == stat.etag:
                return FileReader(descriptor)
            os.close(descriptor)
        raise OSError(errno.EIO, f"content {stat.etag} of {stat.key} was replaced too long ago")

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
        failed = [op for op in operations if not (self._add(op) if isinstance(op, Add) else self._delete(op.key))]
        self._forget_old()
        return failed

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
            self._keep(target)
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
        self._keep(path)
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

    def _keep(self, path: Path) -> None:
        """Readers that know the content at `path` by its etag find it a while longer."""
        try:
            os.link(path, self._replaced / _etag(path.stat()))
        except (FileNotFoundError, FileExistsError):
            return

    def _forget_old(self) -> None:
        for path in self._replaced.iterdir():
            try:
                if time.time() - path.stat().st_ctime > KEEP_REPLACED_S:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process was quicker

    def _path(self, key: str) -> Path:
        path = self._root / key
        if ".." in Path(key).parts or Path(key).is_absolute():
            raise OSError(errno.EINVAL, f"key {key!r} leaves the bucket")
        return path


def _is_folder(status: os.stat_result) -> bool:
    return (status.st_mode & 0o170000) == 0o040000


def _holds_a_file(folder: str) -> bool:
    return any(files for _, _, files in os.walk(folder))


def open_backend(source: str, endpoint: str | None = None) -> Backend:
    """A folder's path, or a bucket id (`ns/name`, perhaps with a folder behind it) if `endpoint` names its Hub."""
    if endpoint is None:
        return FolderBackend(Path(source).absolute())
    from bucket_grpo.emulator.mount_hub import HubBackend

    return HubBackend(source, endpoint=endpoint, token=os.environ.get("HF_TOKEN"))
