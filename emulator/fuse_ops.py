"""The FUSE edge: kernel requests in, `BucketMount` calls out. No rule lives here but the kernel's own cache times.

libfuse's high-level API hands over paths, so the kernel's LOOKUP and GETATTR are one call here. hf-mount asks the
bucket in the first only; since a node's own `revalidate_s` bounds both, a stat of an open file is the only difference.
"""

import errno
import itertools
import os
import stat
import threading
from typing import Any

import mfusepy

from bucket_grpo.emulator.mount_fs import BucketMount
from bucket_grpo.emulator.mount_nodes import Node, name_of


class BucketOperations(mfusepy.Operations):
    use_ns = True
    # Operations on an open handle come without a path, so they also work once the name is gone.
    flag_nopath = True
    flag_nullpath_ok = True

    def __init__(self, mount: BucketMount) -> None:
        self._mount = mount
        self.ready = threading.Event()
        self._open_folders: dict[int, str] = {}
        self._folder_numbers = itertools.count(1)

    def init(self, path: str) -> None:
        self.ready.set()

    # ---- names

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        return _attributes(self._mount.stat(_key(path)) if path is not None else self._mount.stat_handle(fh or 0))

    def readdir(self, path: str, fh: int) -> list[Any]:
        entries = [(name_of(node.key), _attributes(node), 0) for node in self._mount.children(self._open_folders[fh])]
        return [".", "..", *entries]

    def opendir(self, path: str) -> int:
        number = next(self._folder_numbers)
        self._open_folders[number] = _key(path)
        return number

    def releasedir(self, path: str, fh: int) -> int:
        del self._open_folders[fh]
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._mount.make_folder(_key(path))
        return 0

    def rmdir(self, path: str) -> int:
        self._mount.remove_folder(_key(path))
        return 0

    def unlink(self, path: str) -> int:
        self._mount.unlink(_key(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._mount.rename(_key(old), _key(new))
        return 0

    # Owners and modes are not kept by a bucket; hf-mount takes the calls and forgets them at unmount.
    def chmod(self, path: str, mode: int) -> int:
        return self._forgotten()

    def chown(self, path: str, uid: int, gid: int) -> int:
        return self._forgotten()

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if path is not None and times is not None:
            self._mount.touch(_key(path), times[1] / 1e9)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        """A bucket has no size: enough for any tool that looks before it writes."""
        blocks = 1 << 40
        return {"f_bsize": 4096, "f_frsize": 4096, "f_blocks": blocks, "f_bfree": blocks, "f_bavail": blocks}

    # ---- files

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return self._mount.create(_key(path))

    def open(self, path: str, flags: int) -> int:
        return self._mount.open(_key(path), flags)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._mount.read(fh, offset, size)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._mount.write(fh, offset, data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._mount.truncate(_key(path), length, fh)
        return 0

    def flush(self, path: str, fh: int) -> int:
        self._mount.flush(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._mount.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        self._mount.release(fh)
        return 0

    def _forgotten(self) -> int:
        if self._mount.read_only:
            raise OSError(errno.EROFS, "mounted read-only")
        return 0


def serve_fuse(operations: BucketOperations, path: str, *, kernel_ttl_s: float, read_only: bool, source: str) -> None:
    """Mount at `path` and serve until it is unmounted. Raises `RuntimeError` if the mount fails."""
    options: dict[str, Any] = {"ro": True} if read_only else {}
    if os.geteuid() == 0:
        options["allow_other"] = True  # the processes that use the mount may run as somebody else
    mfusepy.FUSE(
        operations,
        path,
        foreground=True,
        fsname=source.replace(",", "_"),
        subtype="bucket",
        entry_timeout=kernel_ttl_s,
        attr_timeout=kernel_ttl_s,
        negative_timeout=0,
        max_idle_threads=10,  # unset, libfuse 3.14 complains about its own default
        # Pages outlive a close; the kernel drops them when it sees a new time or size.
        kernel_cache=True,
        hard_remove=True,
        **options,
    )


def _key(path: str | None) -> str:
    return (path or "/").strip("/")


def _attributes(node: Node) -> dict[str, Any]:
    mtime = int(node.mtime * 1e9)
    return {
        "st_mode": (stat.S_IFDIR | 0o755) if node.is_folder else (stat.S_IFREG | 0o644),
        "st_nlink": 2 if node.is_folder else 1,
        "st_size": node.size,
        "st_blocks": (node.size + 511) // 512,
        "st_uid": os.getuid(),
        "st_gid": os.getgid(),
        "st_mtime": mtime,
        "st_ctime": mtime,
        "st_atime": mtime,
    }
