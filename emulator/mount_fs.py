"""A mounted bucket without the kernel: the tree, the flush loop, staging files and open handles, put together.

The FUSE operations (`fuse_ops`) are a thin layer over this class, and tests drive it directly. Paths here are keys:
`""` is the root. Every method raises `OSError` with the errno that the application shall see.
"""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bucket_grpo.emulator.backends import Add, Backend, Delete, FileReader, Operation, Reader, Stat
from bucket_grpo.emulator.faults import FaultControl, FaultyBackend
from bucket_grpo.emulator.mount_flush import FlushSchedule
from bucket_grpo.emulator.mount_nodes import Answer, Commit, FlushItem, Head, Inquiry, Node, Question
from bucket_grpo.emulator.mount_tree import Tree
from bucket_grpo.emulator.profiles import MountProfile

R = TypeVar("R")


@dataclass
class Handle:
    node: Node
    reader: Reader
    descriptor: int | None = None  # of the staging file, if the handle may write


class BucketMount:
    """One mount. `start` begins flushing and polling; `stop` flushes what is left and removes the staging files."""

    def __init__(
        self,
        backend: Backend,
        profile: MountProfile,
        *,
        read_only: bool = False,
        control: FaultControl | None = None,
        staging_parent: Path | None = None,
    ) -> None:
        self.profile = profile
        self.read_only = read_only
        self._control = control or FaultControl()
        self._backend = FaultyBackend(backend, self._control)
        self._tree = Tree(profile, time.monotonic, time.time)
        self._schedule: FlushSchedule[Node] = FlushSchedule(profile.flush_debounce_s, profile.flush_window_s)
        self._staging = Path(tempfile.mkdtemp(prefix="bucket-mount-", dir=staging_parent))
        self._errors: dict[Node, OSError] = {}
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._uploading: set[Node] = set()
        # One lock for memory, never held while the bucket or a disk is asked; `_wake` shares it.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._stopping = False
        self._threads: list[threading.Thread] = []

    # ---- life

    def start(self) -> None:
        loops = [self._flush_loop] + ([self._poll_loop] if self.profile.poll_s > 0 else [])
        self._threads = [threading.Thread(target=loop, daemon=True, name=loop.__name__) for loop in loops]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Flush everything dirty once more, for at most `shutdown_flush_s`; what is still left is lost."""
        with self._wake:
            for node in self._tree.dirty_nodes():
                self._schedule.signal(time.monotonic(), node)
            if self._tree.queued_deletes:
                self._schedule.signal(time.monotonic())
            self._stopping = True
            self._wake.notify_all()
        deadline = time.monotonic() + self.profile.shutdown_flush_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _say(f"flush did not end within {self.profile.shutdown_flush_s:g} s; what it had left is lost")
        shutil.rmtree(self._staging, ignore_errors=True)

    # ---- names

    def stat(self, key: str) -> Node:
        node = self._ask(self._tree.lookup(key))
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", key)
        return node

    def stat_handle(self, number: int) -> Node:
        return self._handle(number).node

    def children(self, key: str) -> list[Node]:
        return self._ask(self._tree.children(key))

    def make_folder(self, key: str) -> None:
        self._check_writable()
        self._ask(self._tree.make_folder(key))

    def remove_folder(self, key: str) -> None:
        self._check_writable()
        self._ask(self._tree.remove_folder(key))

    def unlink(self, key: str) -> None:
        self._check_writable()
        node = self._ask(self._tree.unlink(key))
        self._signal(None)
        self._drop_staging(node)

    def rename(self, old: str, new: str) -> None:
        self._check_writable()
        replaced = self._ask(self._tree.rename(old, new))
        if replaced:
            self._drop_staging(replaced)

    def touch(self, key: str, mtime: float) -> None:
        """Times live in memory only, as with hf-mount."""
        self._check_writable()
        self.stat(key).mtime = mtime

    # ---- files

    def create(self, key: str) -> int:
        self._check_writable()
        node = self._ask(self._tree.create(key))
        return self._open_staged(node, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def open(self, key: str, flags: int) -> int:
        """Never asks the bucket whether the file changed: it opens what the last lookup saw."""
        with self._lock:
            node = self._tree.known(key)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", key)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._check_writable()
            self._prepare_staging(node, truncate=bool(flags & os.O_TRUNC))
            return self._open_staged(node, os.O_RDWR)
        with self._lock:
            if node.dirty:
                return self._register(Handle(node, FileReader(os.open(self._staged(node), os.O_RDONLY))))
        return self._register(Handle(node, self._backend.open(_stat_of(node))))

    def read(self, number: int, offset: int, size: int) -> bytes:
        return self._handle(number).reader.read(offset, size)

    def write(self, number: int, offset: int, data: bytes) -> int:
        handle = self._handle(number)
        if handle.descriptor is None:
            raise OSError(errno.EBADF, "not open for writing", handle.node.key)
        if self._control.now().disk_full == "staging" and self._control.now().hits_key(handle.node.key):
            raise OSError(errno.ENOSPC, "fault: disk_full=staging", handle.node.key)
        written = os.pwrite(handle.descriptor, data, offset)
        with self._lock:
            handle.node.changed(max(handle.node.size, offset + written), time.time())
        return written

    def truncate(self, key: str, size: int, number: int | None) -> None:
        self._check_writable()
        opened = self.open(key, os.O_RDWR) if number is None else number
        handle = self._handle(opened)
        if handle.descriptor is None:
            raise OSError(errno.EBADF, "not open for writing", handle.node.key)
        os.ftruncate(handle.descriptor, size)
        with self._lock:
            handle.node.changed(size, time.time())
        if number is None:
            self.release(opened)

    def flush(self, number: int) -> None:
        """`close()`: returns at once; the only place where an earlier failed flush of the file shows."""
        handle = self._handle(number)
        with self._lock:
            error = self._errors.pop(handle.node, None)
        if error is not None:
            raise OSError(errno.EIO, f"an earlier flush failed: {error}", handle.node.key)

    def fsync(self, number: int) -> None:
        """Only asks for a flush. The upload takes the file as it then is, also if the application is still writing."""
        self._signal(self._handle(number).node)

    def release(self, number: int) -> None:
        with self._lock:
            handle = self._handles.pop(number)
            handle.node.handles -= 1
        handle.reader.close()
        if handle.descriptor is not None and not handle.node.unlinked:
            self._signal(handle.node)
        self._drop_staging(handle.node)

    # ---- staging

    def _staged(self, node: Node) -> Path:
        return self._staging / f"{id(node):x}"

    def _open_staged(self, node: Node, flags: int) -> int:
        descriptor = os.open(self._staged(node), flags | os.O_CLOEXEC, 0o600)
        return self._register(Handle(node, FileReader(descriptor), descriptor))

    def _prepare_staging(self, node: Node, *, truncate: bool) -> None:
        """A write needs the whole file on the local disk first, unless it starts empty."""
        staged = self._staged(node)
        with self._wake:
            # An upload reads the file: emptying it now would send a torn object.
            self._wake.wait_for(lambda: node not in self._uploading)
            reusable = (node.dirty or node.staged_is_current) and staged.exists()
        if truncate or (not reusable and node.size == 0):
            staged.write_bytes(b"")
        elif not reusable:
            with _closing(self._backend.open(_stat_of(node))) as reader, staged.open("wb") as out:
                for offset in range(0, node.size, 1 << 20):
                    out.write(reader.read(offset, 1 << 20))
        with self._lock:
            node.changed(0 if truncate else node.size, time.time())

    def _drop_staging(self, node: Node) -> None:
        """Free the local copy once the bucket has the bytes, or nobody wants them any more."""
        with self._lock:
            if node.handles == 0 and (node.unlinked or not node.dirty) and node not in self._uploading:
                node.staged_is_current = False
                self._staged(node).unlink(missing_ok=True)

    # ---- handles

    def _register(self, handle: Handle) -> int:
        with self._lock:
            number = self._next_handle
            self._next_handle += 1
            self._handles[number] = handle
            handle.node.handles += 1
            return number

    def _handle(self, number: int) -> Handle:
        with self._lock:
            return self._handles[number]

    def _check_writable(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, "mounted read-only")

    # ---- asking the bucket

    def _ask(self, inquiry: Inquiry[R]) -> R:
        """Drive one of the tree's generators; the lock is free while the bucket answers."""
        answer: Answer = None
        problem: OSError | None = None
        while True:
            with self._lock:
                try:
                    question = inquiry.throw(problem) if problem else inquiry.send(answer)
                except StopIteration as done:
                    return done.value
            answer, problem = None, None
            try:
                answer = self._answer(question)
            except OSError as error:
                problem = error

    def _answer(self, question: Question) -> Answer:
        time.sleep(self.profile.request_s)
        if isinstance(question, Head):
            return self._backend.stat(question.key)
        if isinstance(question, Commit):
            self._commit(question.operations)
            return None
        return self._backend.list_folder(question.key)

    def _commit(self, operations: Sequence[Operation]) -> None:
        for op in self._backend.commit(operations):
            # A Hub answers 200 with the failures in its body, which hf-mount does not read.
            _say(f"the bucket did not apply {op}; the mount takes the batch for a success")

    # ---- loops

    def _signal(self, node: Node | None) -> None:
        with self._wake:
            self._schedule.signal(time.monotonic(), node)
            self._wake.notify_all()

    def _flush_loop(self) -> None:
        while True:
            with self._wake:
                while (batch := self._schedule.take(time.monotonic(), force=self._stopping)) is None:
                    if self._stopping:
                        return
                    due = self._schedule.due_at()
                    self._wake.wait(None if due is None else max(0.0, due - time.monotonic()))
                deletes = self._tree.take_deletes()
            self._send_deletes(deletes)
            self._flush_batch(batch)
            with self._wake:
                self._schedule.finished(time.monotonic())

    def _send_deletes(self, deletes: Sequence[Operation]) -> None:
        if not deletes:
            return
        try:
            self._commit(deletes)
        except OSError as error:
            _say(f"deleting failed, kept for the next flush: {error}")
            with self._lock:
                self._tree.queued_deletes += [op.key for op in deletes]

    def _flush_batch(self, nodes: Sequence[Node]) -> None:
        with self._lock:
            items = self._tree.begin_flush(nodes)
            self._uploading = {item.node for item in items}
        if not items:
            return
        try:
            uploaded = self._upload(items)
            additions = [Add(item.key, stat.etag) for item, stat in zip(items, uploaded, strict=True)]
            self._commit(additions + [Delete(key) for item in items for key in item.old_keys])
            with self._lock:
                for item, stat in zip(items, uploaded, strict=True):
                    self._tree.flushed(item, stat)
        except OSError as error:
            _say(f"flush of {', '.join(item.key for item in items)} failed and is not tried again: {error}")
            with self._lock:
                self._errors.update({item.node: error for item in items})
        for item in items:
            self._drop_staging(item.node)

    def _upload(self, items: Sequence[FlushItem]) -> list[Stat]:
        try:
            size = sum(self._staged(item.node).stat().st_size for item in items)
            bandwidth = self.profile.upload_bandwidth
            time.sleep(self.profile.upload_s + (size / bandwidth if bandwidth else 0.0))
            return [self._backend.upload(self._staged(item.node), item.key) for item in items]
        finally:
            with self._wake:
                self._uploading = set()
                self._wake.notify_all()

    def _poll_loop(self) -> None:
        while True:
            with self._wake:
                if self._wake.wait_for(lambda: self._stopping, timeout=self.profile.poll_s):
                    return
                folders, asked_at = self._tree.folders_to_poll(), time.monotonic()
            listings = {}
            for folder in folders:
                try:
                    listings[folder] = self._backend.list_folder(folder)
                except OSError as error:
                    _say(f"polling {folder or '/'} failed, tried again in {self.profile.poll_s:g} s: {error}")
            with self._lock:
                self._tree.apply_poll(listings, asked_at)


def _stat_of(node: Node) -> Stat:
    return Stat(node.key, node.size, node.mtime, node.etag or "")


@contextlib.contextmanager
def _closing(reader: Reader) -> Iterator[Reader]:
    try:
        yield reader
    finally:
        reader.close()


def _say(message: str) -> None:
    print(f"[mount] {message}", file=sys.stderr, flush=True)
