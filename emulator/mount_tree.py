"""What one mount believes about its bucket, and when it asks again. Pure: no I/O, the clock is injected.

A method that needs the bucket is a generator: it yields a question (`Head`, `ListFolder`, `Commit`), is resumed with
the answer, and raises `OSError` for the caller. The rules are hf-mount's:

- a known file is asked for again by a lookup, at most every `revalidate_s`; opening it never asks;
- a name that was missing stays missing for `negative_ttl_s`, whatever was committed meanwhile;
- a folder's listing, once loaded, is believed until a poll finds something new in it;
- a file with unsent local changes ("dirty") wins over the bucket, and a rename of it sends nothing;
- a rename of committed files is a batch of additions and then deletions, not a transaction.
"""

import errno
from collections.abc import Callable, Iterable, Mapping

from bucket_grpo.emulator.backends import Add, Delete, Listing, Operation, Stat
from bucket_grpo.emulator.mount_nodes import (
    Commit,
    FlushItem,
    Head,
    Inquiry,
    ListFolder,
    Node,
    in_use,
    name_of,
    parent_of,
    walk,
)
from bucket_grpo.emulator.profiles import MountProfile

MAX_MISSES = 1000  # hf-mount's; the oldest gives way


class Tree:
    def __init__(self, profile: MountProfile, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self._profile = profile
        self._clock = clock
        self._wall_clock = wall_clock
        self._missing: dict[str, float] = {}
        self._root = Node("", is_folder=True)
        self.queued_deletes: list[str] = []

    # ---- asking

    def lookup(self, key: str) -> Inquiry[Node | None]:
        if not key:
            return self._root
        parent = self.known(parent_of(key))
        if parent is None:
            return None
        if not parent.is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", parent.key)
        node = parent.children.get(name_of(key))
        if node and not node.is_folder:
            return node if node.dirty else (yield from self._revalidate(node))
        if node and parent.listed:
            return node
        if node is None and parent.made_here and parent.listed:
            return None
        if self._is_known_missing(key):
            return None
        stat = yield Head(key)
        assert stat is None or isinstance(stat, Stat)
        if stat:
            return self._learn_file(stat, validated=True)
        # A HEAD knows no folders: only a listing can tell.
        if parent.listed:
            if (yield ListFolder(key)):
                return self._learn_folder(key)
        else:
            yield from self._load(parent)
            if found := self.known(key):
                return found
        self._remember_missing(key)
        return None

    def children(self, key: str) -> Inquiry[list[Node]]:
        """A folder's entries, from memory if it was listed before."""
        folder = self._folder(key)
        yield from self._load(folder)
        return list(folder.children.values())

    def known(self, key: str) -> Node | None:
        """The node at `key` without asking anybody: all that `open` ever does."""
        node = self._root
        for name in key.split("/") if key else ():
            child = node.children.get(name)
            if child is None:
                return None
            node = child
        return node

    def _revalidate(self, node: Node) -> Inquiry[Node | None]:
        now = self._clock()
        if node.validated_at is not None and now - node.validated_at < self._profile.revalidate_s:
            return node
        key = node.key
        try:
            stat = yield Head(key)
        except OSError:
            return node  # hf-mount serves what it knows while the Hub does not answer
        if self.known(key) is not node or node.dirty:
            return self.known(key)
        if stat is None:
            self._detach(node)
            return None
        assert isinstance(stat, Stat)
        self._update(node, stat)
        node.validated_at = self._clock()
        return node

    def _load(self, folder: Node) -> Inquiry[None]:
        if folder.listed:
            return
        asked_at = self._clock()
        listing = yield ListFolder(folder.key)
        assert isinstance(listing, Listing)
        for stat in listing.files:
            self._learn_file(stat, validated=False)
        for key in listing.folders:
            self._learn_folder(key)
        shown = {stat.key for stat in listing.files} | set(listing.folders)
        for child in list(folder.children.values()):
            if child.key not in shown and not child.made_here and not in_use(child) and child.placed_at < asked_at:
                self._detach(child)
        folder.made_here = folder.made_here and not listing
        folder.listed = self._profile.poll_s > 0

    # ---- polling

    def folders_to_poll(self) -> list[str]:
        return [node.key for node in walk(self._root) if node.is_folder and node.listed and not node.made_here]

    def apply_poll(self, listings: Mapping[str, Listing], asked_at: float) -> None:
        """Take in listings that were asked for at `asked_at`.

        Changed files are updated, vanished ones dropped, and a folder with something new is read again when it is next
        listed; names below it are no longer held for missing.
        """
        for key, listing in listings.items():
            folder = self.known(key)
            if folder is None or not folder.is_folder:
                continue
            shown = {stat.key: stat for stat in listing.files}
            for child in list(folder.children.values()):
                if child.is_folder or child.dirty or child.placed_at >= asked_at:
                    continue
                if stat := shown.get(child.key):
                    self._update(child, stat)
                else:
                    self._detach(child)
            if any(self.known(news) is None for news in (*shown, *listing.folders)):
                folder.listed = False
                prefix = f"{key}/" if key else ""
                self._missing = {k: t for k, t in self._missing.items() if not k.startswith(prefix)}

    # ---- changing

    def create(self, key: str) -> Inquiry[Node]:
        """A new empty file. `FileExistsError` also if only the bucket knew it."""
        parent = self._folder(parent_of(key))
        yield from self._load(parent)
        if name_of(key) in parent.children:
            raise FileExistsError(errno.EEXIST, "file exists", key)
        node = Node(key)
        node.changed(0, self._wall_clock())
        self._attach(node)
        return node

    def make_folder(self, key: str) -> Inquiry[Node]:
        """Only this mount sees an empty folder: a bucket has none."""
        parent = self._folder(parent_of(key))
        yield from self._load(parent)
        if name_of(key) in parent.children:
            raise FileExistsError(errno.EEXIST, "file exists", key)
        node = Node(key, is_folder=True, mtime=self._wall_clock(), made_here=True, listed=self._profile.poll_s > 0)
        self._attach(node)
        return node

    def unlink(self, key: str) -> Inquiry[Node]:
        """Gone here at once; the bucket is told with the next flush."""
        yield from self._load(self._folder(parent_of(key)))
        node = self._existing(key)
        if node.is_folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder", key)
        if node.etag is not None:
            self.queued_deletes.append(key)
        self._detach(node)
        self._remember_missing(key)
        return node

    def remove_folder(self, key: str) -> Inquiry[None]:
        if deletes := self.take_deletes():
            yield Commit(deletes)
        folder = self._folder(key)
        yield from self._load(folder)
        if folder.children:
            raise OSError(errno.ENOTEMPTY, "folder is not empty", key)
        self._detach(folder)
        self._remember_missing(key)

    def rename(self, old: str, new: str) -> Inquiry[Node | None]:
        """Move a file or folder; returns the node that it replaced.

        Committed files are added under the new keys, then deleted under the old. A dirty file sends nothing: its next
        flush goes to the new key. But a flush that is already on its way ends at the old key and marks the file clean.
        """
        yield from self._load(self._folder(parent_of(old)))
        yield from self._load(self._folder(parent_of(new)))
        node = self._existing(old)
        if new == old:
            return None
        if node.is_folder:
            if new.startswith(f"{old}/"):
                raise OSError(errno.EINVAL, "a folder cannot move into itself", new)
            yield from self._load_subtree(node)
        self._check_replaceable(node, self.known(new))
        moved = [n for n in walk(node) if not n.is_folder]
        committed = [n for n in moved if n.etag is not None and not n.dirty]
        operations: list[Operation] = [Add(new + n.key[len(old) :], n.etag or "", source=n.key) for n in committed]
        operations += [Delete(n.key) for n in committed]
        if operations:
            yield Commit(tuple(operations))
        replaced = self.known(new)
        if replaced:
            self._detach(replaced)
        self._detach(node)
        node.unlinked = False
        for n in moved:
            if n.dirty and n.etag is not None:
                n.old_keys.append(n.key)
        for n in walk(node):
            n.key = new + n.key[len(old) :]
        self._attach(node)
        self._remember_missing(old)
        self.queued_deletes = [k for k in self.queued_deletes if k != new and not k.startswith(f"{new}/")]
        return replaced

    # ---- flushing

    def take_deletes(self) -> tuple[Operation, ...]:
        deletes = tuple(Delete(key) for key in self.queued_deletes)
        self.queued_deletes = []
        return deletes

    def begin_flush(self, nodes: Iterable[Node]) -> list[FlushItem]:
        """What is worth uploading of `nodes`, under the keys that they have now."""
        return [FlushItem(n, n.key, n.generation, tuple(n.old_keys)) for n in nodes if n.dirty and not n.unlinked]

    def flushed(self, item: FlushItem, stat: Stat) -> None:
        """The batch with `item` was answered with success. A file that changed meanwhile stays dirty."""
        node = item.node
        if node.generation == item.generation:
            node.generation = 0
            node.etag, node.size, node.staged_is_current = stat.etag, stat.size, True
            node.old_keys.clear()
        node.validated_at = node.placed_at = self._clock()

    def dirty_nodes(self) -> list[Node]:
        return [node for node in walk(self._root) if node.dirty]

    # ---- book-keeping

    def _is_known_missing(self, key: str) -> bool:
        since = self._missing.get(key)
        return since is not None and self._clock() - since < self._profile.negative_ttl_s

    def _remember_missing(self, key: str) -> None:
        self._missing.pop(key, None)
        if len(self._missing) >= MAX_MISSES:
            del self._missing[next(iter(self._missing))]
        self._missing[key] = self._clock()

    def _existing(self, key: str) -> Node:
        node = self.known(key)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", key)
        return node

    def _folder(self, key: str) -> Node:
        node = self._existing(key)
        if not node.is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", key)
        return node

    def _check_replaceable(self, source: Node, target: Node | None) -> None:
        if target is None:
            return
        if target.is_folder and not source.is_folder:
            raise IsADirectoryError(errno.EISDIR, "is a folder", target.key)
        if source.is_folder and not target.is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", target.key)
        if target.children:
            raise OSError(errno.ENOTEMPTY, "folder is not empty", target.key)

    def _learn_file(self, stat: Stat, *, validated: bool) -> Node:
        node = self.known(stat.key)
        if node is None or node.is_folder:
            node = Node(stat.key, size=stat.size, mtime=stat.mtime, etag=stat.etag)
            self._attach(node)
        elif not node.dirty and validated:
            self._update(node, stat)
        if validated:
            node.validated_at = self._clock()
        return node

    def _learn_folder(self, key: str) -> Node:
        node = self.known(key)
        if node is None or not node.is_folder:
            node = Node(key, is_folder=True, mtime=self._wall_clock())
            self._attach(node)
        node.made_here = False
        return node

    @staticmethod
    def _update(node: Node, stat: Stat) -> None:
        if node.etag != stat.etag:
            node.size, node.mtime, node.etag, node.staged_is_current = stat.size, stat.mtime, stat.etag, False

    def _attach(self, node: Node) -> None:
        self._folder(parent_of(node.key)).children[name_of(node.key)] = node
        node.placed_at = self._clock()
        self._missing.pop(node.key, None)

    def _detach(self, node: Node) -> None:
        parent = self.known(parent_of(node.key))
        if parent and parent.children.get(name_of(node.key)) is node:
            del parent.children[name_of(node.key)]
        node.unlinked = True

    def _load_subtree(self, folder: Node) -> Inquiry[None]:
        yield from self._load(folder)
        for child in list(folder.children.values()):
            if child.is_folder:
                yield from self._load_subtree(child)
