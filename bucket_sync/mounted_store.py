"""A bucket as a path: hf-mount's FUSE mount, its local emulation, or a plain directory.

On a mount `close()` returns before anything is uploaded, a rename is many operations (and can lose a file that is being
uploaded), and only somebody else can tell whether the commit worked. So: the final name is written once, in place, and
`committed_in` is asked. A plain directory does better, so there everything appears by an atomic link or rename.
"""

import contextlib
import errno
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from bucket_grpo.bucket_sync.store_contract import (
    Conflict,
    NotConfirmed,
    NotFound,
    ObjectInfo,
    Store,
    StoreError,
    check_folder,
    check_key,
)
from bucket_grpo.bucket_sync.version_file import MAX_VERSION_BYTES

POLL_S = 0.1
READ_BYTES = 8 * 1024 * 1024


class MountedStore:
    """A path such as `/lora`.

    Args:
        path: the mount or directory; it must exist.
        committed_in: a store in which committed objects show up: the bucket itself (`HubStore`), or the objects folder
            behind an emulated mount. Without one, a plain directory confirms itself, and a mount confirms `settle_s`
            after the write (hf-mount's debounce of 2 s, an upload, a margin): only readers then notice a lost commit.
        settle_s: see `committed_in`.
        mounted: whether `path` behaves as a mount; found out from the kind of filesystem if not given.
    """

    def __init__(
        self, path: Path | str, *, committed_in: Store | None = None, settle_s: float = 5.0, mounted: bool | None = None
    ) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise StoreError(f"{self.path} is not a directory: mount the bucket there first")
        self._mounted = is_mount(self.path) if mounted is None else mounted
        self._committed_in = committed_in
        self._settle_s = settle_s

    def __repr__(self) -> str:
        return f"MountedStore({self.path})"

    def read(self, key: str, *, max_bytes: int = MAX_VERSION_BYTES) -> bytes:
        with self._errors("read", key), (self.path / check_key(key)).open("rb", buffering=0) as file:
            pieces, size = [], 0
            while piece := file.read(READ_BYTES):
                pieces.append(piece)
                size += len(piece)
                if size > max_bytes:
                    raise StoreError(f"{self}: {key} has more than {max_bytes} bytes")
            return b"".join(pieces)

    def write_once(self, key: str, data: bytes) -> None:
        path = self.path / check_key(key)
        with self._errors("write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._mounted:
                self._link_once(path, data)
                return
            try:
                _write_in_place(path, data, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                self._hand_over_again(key, path, data)

    def _hand_over_again(self, key: str, path: Path, data: bytes) -> None:
        """The name is taken by what this machine wrote; a mount goes on showing it also when its commit was lost."""
        committed = self.committed_size(key)
        if committed is not None and self._committed_in is not None:
            if committed != len(data) or self._committed_in.read(key) != data:
                raise self._conflict(key)
            return
        try:
            if path.read_bytes() != data:
                raise self._conflict(key)
            flags = 0
        except OSError as error:
            if error.errno != errno.EIO or self._committed_in is None:
                raise
            flags = os.O_TRUNC  # the content was lost with its commit, and no reader can ever have seen it
        if committed is None:
            _write_in_place(path, data, flags)

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        seen: int | None = None
        while True:
            with contextlib.suppress(NotFound):
                seen = self.committed_size(key)
            if seen == size:
                return
            if time.monotonic() >= deadline:
                where = self._committed_in or self
                raise NotConfirmed(
                    f"{self}: {key} ({size} bytes) is not in {where!r} after {timeout_s:.1f} s (seen: {seen} bytes)"
                )
            time.sleep(POLL_S)

    def committed_size(self, key: str) -> int | None:
        if self._committed_in is not None:
            return self._committed_in.committed_size(key)
        with self._errors("look up", key):
            try:
                status = (self.path / check_key(key)).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        settled = not self._mounted or time.time() - status.st_mtime >= self._settle_s
        return status.st_size if settled else None

    def write_pointer(self, key: str, data: bytes) -> None:
        path = self.path / check_key(key)
        with self._errors("write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._mounted:
                _write_in_place(path, data, os.O_CREAT | os.O_TRUNC)
            else:
                staged = _stage(path, data)
                staged.rename(path)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        root = self.path / check_folder(folder)
        found = []
        with self._errors("list", folder):
            for parent, folders, files in os.walk(root, onerror=_unless_missing):
                folders[:] = [name for name in folders if not name.startswith(".")]
                for name in files:
                    if name.startswith("."):
                        continue
                    path = Path(parent) / name
                    with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                        status = path.stat()
                        modified_at = datetime.fromtimestamp(status.st_mtime, UTC)
                        found.append(ObjectInfo(path.relative_to(self.path).as_posix(), status.st_size, modified_at))
        return sorted(found)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._errors("delete", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.path / check_key(key)).unlink()

    def _link_once(self, path: Path, data: bytes) -> None:
        if path.exists():
            self._same_or_conflict(path, data)
            return
        staged = _stage(path, data)
        try:
            os.link(staged, path)
        except FileExistsError:
            self._same_or_conflict(path, data)
        finally:
            staged.unlink()

    def _same_or_conflict(self, path: Path, data: bytes) -> None:
        if path.read_bytes() != data:
            raise self._conflict(path.relative_to(self.path).as_posix())

    def _conflict(self, key: str) -> Conflict:
        return Conflict(f"{self}: {key} holds other bytes already; a name is used once")

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self}: cannot {verb} {key}: it is not there") from error
        except OSError as error:
            cause = errno.errorcode.get(error.errno or 0, "")
            raise StoreError(f"{self}: cannot {verb} {key}: {error.strerror or error} {cause}".rstrip()) from error


def is_mount(path: Path) -> bool:
    """Whether `path` lies on a FUSE or NFS mount, the two ways in which hf-mount serves a bucket."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except FileNotFoundError:
        return os.path.ismount(path)
    real, best = os.path.realpath(path), ("", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = unescaped(before.split()[4])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, after.split()[0])
    return best[1].startswith(("fuse", "nfs"))


def unescaped(field: str) -> str:
    """A path from the kernel's list of mounts, where a space or a tab stands as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _stage(path: Path, data: bytes) -> Path:
    descriptor, staged = tempfile.mkstemp(prefix=".staged-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        Path(staged).unlink()
        raise
    return Path(staged)


def _write_in_place(path: Path, data: bytes, flags: int) -> None:
    """Write and close the final name; `close` may report that an earlier commit of this file failed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    except OSError:
        if flags & os.O_EXCL:  # a part of a record must not be committed; a pointer's name has an older content to keep
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    finally:
        os.close(descriptor)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
