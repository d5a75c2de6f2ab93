"""Without FUSE: a plain folder kept like the bucket, with a mount's delays. Simple, and weaker than a mount.

What is kept: a file written into the folder reaches the bucket when it has not changed for the flush debounce; a new
object reaches the folder after the negative-cache time, a changed or deleted one after the revalidation time (the
worst case of a mount, every time). What is not: a read-only folder can be written to (it is only ignored), there is no
EIO, no kernel cache, and a writer that pauses for longer than the debounce has its unfinished file committed.
"""

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from bucket_grpo.emulator.backends import PRIVATE_FOLDER, Add, Backend, Delete, Stat
from bucket_grpo.emulator.faults import FaultControl, FaultyBackend
from bucket_grpo.emulator.mount_process import stop_on_signals
from bucket_grpo.emulator.profiles import MountProfile

TICK_S = 0.1
Signature = tuple[int, int, int]  # inode, mtime in ns, size: changes with every write and every rename


class Move(StrEnum):
    PUSH = "push"  # folder → bucket
    PULL = "pull"  # bucket → folder
    DELETE_THERE = "delete in the bucket"
    DELETE_HERE = "delete in the folder"


@dataclass
class Mirror:
    """Which copies are due: pure. `synced` is what both sides last agreed on, per key."""

    profile: MountProfile
    read_only: bool = False
    synced: dict[str, tuple[Signature, str]] = field(default_factory=dict)
    _seen: dict[str, tuple[object, float]] = field(default_factory=dict)

    def due(
        self, now: float, here: Mapping[str, Signature], there: Mapping[str, str], *, force: bool = False
    ) -> list[tuple[Move, str]]:
        """The moves whose cause has stood unchanged for its delay. `there` holds etags; `force` waits for none."""
        moves = []
        for key in sorted(here.keys() | there.keys() | self.synced.keys()):
            state = (here.get(key), there.get(key))
            if state == (None, None):
                del self.synced[key]  # deleted on both sides: agreed
                continue
            if self._seen.get(key, (None, 0.0))[0] != state:
                self._seen[key] = (state, now)
            move = self._wanted(key, *state)
            if move and (force or now - self._seen[key][1] >= self._delay(move, key)):
                moves.append((move, key))
        return moves

    def _wanted(self, key: str, here: Signature | None, there: str | None) -> Move | None:
        last_here, last_there = self.synced.get(key, (None, None))
        if here != last_here and not self.read_only:
            return Move.PUSH if here else (Move.DELETE_THERE if there else None)
        if there != last_there:
            return Move.PULL if there else (Move.DELETE_HERE if here else None)
        return None

    def _delay(self, move: Move, key: str) -> float:
        if move in (Move.PUSH, Move.DELETE_THERE):
            return self.profile.flush_debounce_s
        return self.profile.revalidate_s if key in self.synced else self.profile.negative_ttl_s


def run_plain(backend: Backend, path: Path, profile: MountProfile, *, read_only: bool, control: FaultControl) -> int:
    """Mirror until SIGTERM, then push what is left and empty the folder again. Exit code 2 if `path` is in use."""
    stop = stop_on_signals()
    path.mkdir(parents=True, exist_ok=True)
    private = path / PRIVATE_FOLDER
    if any(path.iterdir()) and not private.exists():
        print(f"cannot mirror into {path}: the folder is not empty", file=sys.stderr, flush=True)
        return 2
    shutil.rmtree(private, ignore_errors=True)
    for left in path.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    private.mkdir()
    folder = _MirroredFolder(FaultyBackend(backend, control), path, Mirror(profile, read_only))
    folder.sync(only_pull=True)
    print(f"mounted {path}", flush=True)
    while not stop.wait(TICK_S):
        folder.sync()
    if not read_only:
        folder.sync(force=True)
    for left in path.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return 0


class _MirroredFolder:
    def __init__(self, backend: FaultyBackend, path: Path, mirror: Mirror) -> None:
        self._backend, self._path, self._mirror = backend, path, mirror

    def sync(self, *, force: bool = False, only_pull: bool = False) -> None:
        there = {stat.key: stat for stat in self._objects("")}
        etags = {key: stat.etag for key, stat in there.items()}
        for move, key in self._mirror.due(time.monotonic(), self._files(), etags, force=force or only_pull):
            if force and move in (Move.PULL, Move.DELETE_HERE):
                continue
            try:
                self._do(move, key, there.get(key))
            except OSError as error:
                print(f"[mirror] {move} of {key} failed, tried again: {error}", file=sys.stderr, flush=True)

    def _do(self, move: Move, key: str, stat: Stat | None) -> None:
        local = self._path / key
        if move is Move.PUSH:
            signature = _signature(local)
            time.sleep(self._mirror.profile.upload_s)
            stat = self._backend.upload(local, key)
            self._backend.commit([Add(key, stat.etag)])
            self._mirror.synced[key] = (signature, stat.etag)
        elif move is Move.PULL and stat is not None:
            self._mirror.synced[key] = (self._pull(stat, local), stat.etag)
        elif move is Move.DELETE_THERE:
            self._backend.commit([Delete(key)])
            del self._mirror.synced[key]
        else:
            local.unlink(missing_ok=True)
            del self._mirror.synced[key]

    def _pull(self, stat: Stat, local: Path) -> Signature:
        part = self._path / PRIVATE_FOLDER / uuid.uuid4().hex
        reader = self._backend.open(stat)
        try:
            with part.open("wb") as out:
                for offset in range(0, stat.size, 1 << 20):
                    out.write(reader.read(offset, 1 << 20))
        finally:
            reader.close()
        local.parent.mkdir(parents=True, exist_ok=True)
        signature = _signature(part)
        part.rename(local)
        return signature

    def _files(self) -> dict[str, Signature]:
        found = {}
        for folder, subfolders, names in os.walk(self._path):
            if PRIVATE_FOLDER in subfolders:
                subfolders.remove(PRIVATE_FOLDER)
            for name in names:
                file = Path(folder, name)
                try:
                    found[file.relative_to(self._path).as_posix()] = _signature(file)
                except FileNotFoundError:
                    continue  # renamed or deleted since the walk saw it
        return found

    def _objects(self, folder: str) -> Iterator[Stat]:
        listing = self._backend.list_folder(folder)
        yield from listing.files
        for subfolder in listing.folders:
            yield from self._objects(subfolder)


def _signature(file: Path) -> Signature:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
