"""A bucket, its writers' mounts and its readers' views, as unfriendly as the real ones may be, without waiting.

The simulation is more hostile than any mount: what a real one does after some seconds, this one does whenever it is
told to. A writer's mount shows its own files at once and commits them, loses them, or commits some of a batch. A reader
may see the truth, nothing, a former state, a part, or garbage.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bucket_grpo.bucket_sync.stores import Conflict, MountedStore, NotConfirmed, NotFound, ObjectInfo, StoreError

STARTED = datetime(2026, 11, 30, tzinfo=UTC)


@dataclass
class Bucket:
    """The truth, as a store of its own: what the Hub's API shows. `ever` keeps all that a key ever held."""

    objects: dict[str, bytes] = field(default_factory=dict)
    ever: dict[str, set[bytes]] = field(default_factory=dict)
    before: list[dict[str, bytes]] = field(default_factory=list)

    def commit(self, key: str, data: bytes) -> None:
        self.before.append(dict(self.objects))
        self.objects[key] = data
        self.ever.setdefault(key, set()).add(data)

    def read(self, key: str, *, max_bytes: int = 2**40) -> bytes:
        if key not in self.objects:
            raise NotFound(key)
        return self.objects[key]

    def write_once(self, key: str, data: bytes) -> None:
        if self.objects.setdefault(key, data) != data:
            raise Conflict(key)
        self.commit(key, data)

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        if self.committed_size(key) != size:
            raise NotConfirmed(key)

    def committed_size(self, key: str) -> int | None:
        return len(self.objects[key]) if key in self.objects else None

    def write_pointer(self, key: str, data: bytes) -> None:
        self.commit(key, data)

    def list(self, folder: str) -> "list[ObjectInfo]":
        return [
            ObjectInfo(key, len(data), STARTED) for key, data in sorted(self.objects.items()) if key.startswith(folder)
        ]

    def delete(self, keys: "list[str]") -> None:
        self.before.append(dict(self.objects))
        for key in keys:
            self.objects.pop(key, None)


class WriterMount(MountedStore):
    """The real `MountedStore` on a folder that stands for one machine's view; `flush` decides what becomes of it."""

    def __init__(self, path: Path, bucket: Bucket) -> None:
        path.mkdir()
        super().__init__(path, committed_in=bucket, mounted=True)
        self._bucket = bucket
        self._flushed: dict[str, tuple[int, int]] = {}

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        super().confirm(key, size, 0.0)

    def list(self, folder: str) -> "list[ObjectInfo]":
        return self._bucket.list(folder)

    def delete(self, keys: "list[str]") -> None:
        super().delete(keys)
        self._bucket.delete(keys)

    def dirty(self) -> "list[str]":
        found = []
        for path in sorted(self.path.rglob("*")):
            key = path.relative_to(self.path).as_posix()
            if path.is_file() and self._flushed.get(key) != _signature(path):
                found.append(key)
        return found

    def flush(self, outcomes: "list[bool]") -> None:
        """Commit each dirty file or lose its commit for good, by `outcomes` (repeated as needed)."""
        for position, key in enumerate(self.dirty()):
            path = self.path / key
            self._flushed[key] = _signature(path)
            if outcomes[position % len(outcomes)]:
                self._bucket.commit(key, path.read_bytes())


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@dataclass
class ReaderView:
    """What one replica sees. `weather` says what the next reads show; the truth when it is used up."""

    bucket: Bucket
    weather: "list[str]" = field(default_factory=list)

    def __repr__(self) -> str:
        return "ReaderView"

    def read(self, key: str, *, max_bytes: int = 2**40) -> bytes:
        kind = self.weather.pop(0) if self.weather else "truth"
        if kind == "missing":
            raise NotFound(key)
        if kind == "eio":
            raise StoreError(f"EIO {key}")
        if kind == "former":
            for objects in self.bucket.before:
                if key in objects:
                    return objects[key]
            raise NotFound(key)
        data = self.bucket.read(key)
        if kind == "part":
            return data[: len(data) // 2]
        if kind == "garbage":
            return data[:-3] + bytes(byte ^ 0x55 for byte in data[-3:])
        if kind == "neighbour":
            return next((other for name, other in sorted(self.bucket.objects.items()) if name != key), data)
        return data
