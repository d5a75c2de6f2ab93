"""What a mount believes about its bucket: each rule of hf-mount, with a clock that the test turns."""

import errno
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bucket_grpo.emulator.backends import Add, Delete, Listing, Operation, Stat
from bucket_grpo.emulator.mount_nodes import Answer, Commit, Head, Inquiry, ListFolder, Node, Question
from bucket_grpo.emulator.mount_tree import Tree
from bucket_grpo.emulator.profiles import PROFILES, MountProfile

OLD_CACHE, NEW_CACHE = PROFILES["hf-mount-2026-08"], PROFILES["hf-mount-2026-09"]


class Bucket:
    """An in-memory bucket that counts what it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Stat] = {}
        self.asked: list[Question] = []
        self.down = False
        self._contents = 0

    def put(self, key: str, size: int = 1) -> str:
        self._contents += 1
        self.objects[key] = Stat(key, size, float(self._contents), f"content-{self._contents}")
        return self.objects[key].etag

    def answer(self, question: Question) -> Answer:
        self.asked.append(question)
        if self.down:
            raise OSError(errno.EIO, "the Hub does not answer")
        if isinstance(question, Head):
            return self.objects.get(question.key)
        if isinstance(question, ListFolder):
            return self.listing(question.key)
        return self.apply(question.operations)

    def listing(self, folder: str) -> Listing:
        prefix = f"{folder}/" if folder else ""
        below = {key[len(prefix) :]: stat for key, stat in self.objects.items() if key.startswith(prefix)}
        files = tuple(stat for rest, stat in below.items() if "/" not in rest)
        return Listing(files, tuple(sorted({prefix + rest.split("/")[0] for rest in below if "/" in rest})))

    def apply(self, operations: tuple[Operation, ...]) -> None:
        for op in operations:
            if isinstance(op, Delete):
                self.objects.pop(op.key, None)
            elif op.source is not None:
                old = self.objects[op.source]
                self.objects[op.key] = Stat(op.key, old.size, old.mtime, old.etag)


class Mount:
    """A tree together with the bucket that answers it."""

    def __init__(self, profile: MountProfile = NEW_CACHE, bucket: Bucket | None = None) -> None:
        self.now = 1000.0
        self.bucket = bucket or Bucket()
        self.tree = Tree(profile, lambda: self.now, lambda: self.now)

    def ask(self, inquiry: Inquiry[object]) -> object:
        answer: Answer = None
        problem: OSError | None = None
        while True:
            try:
                question = inquiry.throw(problem) if problem else inquiry.send(answer)
            except StopIteration as done:
                return done.value
            answer, problem = None, None
            try:
                answer = self.bucket.answer(question)
            except OSError as error:
                problem = error

    def lookup(self, key: str) -> Node | None:
        node = self.ask(self.tree.lookup(key))
        assert node is None or isinstance(node, Node)
        return node

    def names(self, key: str) -> list[str]:
        return sorted(node.key for node in self.ask(self.tree.children(key)))  # type: ignore[attr-defined]

    def write(self, key: str) -> Node:
        node = self.ask(self.tree.create(key))
        assert isinstance(node, Node)
        node.changed(1, self.now)
        return node

    def finish_flush(self, items: list) -> None:
        for item in items:
            self.bucket.put(item.key)
            self.tree.flushed(item, self.bucket.objects[item.key])
            self.bucket.apply(tuple(Delete(key) for key in item.old_keys))

    def flush(self, *nodes: Node) -> None:
        self.finish_flush(self.tree.begin_flush(nodes))


def test_a_lookup_asks_again_at_most_every_ten_seconds() -> None:
    mount = Mount()
    first = mount.bucket.put("current.json")
    assert mount.lookup("current.json").etag == first
    second = mount.bucket.put("current.json")
    mount.now += 9.9
    assert mount.lookup("current.json").etag == first, "stale by up to ten seconds"
    mount.now += 0.2
    assert mount.lookup("current.json").etag == second


def test_opening_never_asks() -> None:
    mount = Mount()
    first = mount.bucket.put("current.json")
    mount.lookup("current.json")
    mount.bucket.put("current.json")
    mount.now += 3600
    mount.bucket.asked.clear()
    assert mount.tree.known("current.json").etag == first
    assert mount.bucket.asked == []


@pytest.mark.parametrize(("profile", "hidden_s"), [(OLD_CACHE, 30.0), (NEW_CACHE, 1.0)])
def test_a_name_probed_too_early_stays_missing(profile: MountProfile, hidden_s: float) -> None:
    mount = Mount(profile)
    assert mount.lookup("v1") is None
    mount.bucket.put("v1")
    mount.now += hidden_s - 0.01
    assert mount.lookup("v1") is None
    mount.now += 0.02
    assert mount.lookup("v1") is not None


def test_probing_again_does_not_prolong_the_miss() -> None:
    mount = Mount(OLD_CACHE)
    mount.lookup("v1")
    mount.bucket.put("v1")
    for _ in range(29):
        mount.now += 1
        assert mount.lookup("v1") is None
    mount.now += 1.01
    assert mount.lookup("v1") is not None


def test_a_name_never_probed_before_is_found_at_once() -> None:
    mount = Mount(OLD_CACHE)
    mount.bucket.put("run/v1")
    mount.lookup("run")
    mount.bucket.put("run/v2")
    assert mount.lookup("run/v2") is not None


def test_a_listing_is_kept_until_a_poll_finds_news() -> None:
    mount = Mount()
    mount.bucket.put("run/v1")
    mount.lookup("run")
    assert mount.names("run") == ["run/v1"]
    mount.bucket.put("run/v2")
    mount.now += 29
    assert mount.names("run") == ["run/v1"]
    mount.tree.apply_poll({key: mount.bucket.listing(key) for key in mount.tree.folders_to_poll()}, mount.now)
    assert mount.names("run") == ["run/v1", "run/v2"]


def test_a_poll_clears_misses_below_the_folders_that_changed() -> None:
    mount = Mount(OLD_CACHE)
    mount.bucket.put("run/v1")
    mount.lookup("run")
    mount.names("run")
    assert mount.lookup("run/v2") is None
    mount.bucket.put("run/v2")
    assert mount.lookup("run/v2") is None
    mount.tree.apply_poll({key: mount.bucket.listing(key) for key in mount.tree.folders_to_poll()}, mount.now)
    assert mount.lookup("run/v2") is not None


def test_a_poll_takes_in_changes_and_deletions_but_not_over_local_writes() -> None:
    mount = Mount()
    for key in ("changed", "deleted", "written"):
        mount.bucket.put(key)
    mount.names("")
    mount.tree.known("written").changed(5, mount.now)
    etag = mount.bucket.put("changed", size=9)
    mount.bucket.put("written")
    del mount.bucket.objects["deleted"]
    mount.tree.apply_poll({"": mount.bucket.listing("")}, mount.now + 1)
    assert mount.tree.known("changed").etag == etag
    assert mount.tree.known("deleted") is None
    assert mount.tree.known("written").size == 5


def test_a_listing_asked_for_before_a_commit_does_not_hide_it() -> None:
    mount = Mount()
    mount.names("")
    asked_at, listing = mount.now, mount.bucket.listing("")
    mount.now += 1
    mount.flush(mount.write("v1"))
    mount.tree.apply_poll({"": listing}, asked_at)
    assert mount.tree.known("v1") is not None


def test_a_deleted_object_is_missing_once_it_is_asked_for() -> None:
    mount = Mount()
    mount.bucket.put("v1")
    mount.lookup("v1")
    del mount.bucket.objects["v1"]
    assert mount.lookup("v1") is not None
    mount.now += 10.1
    assert mount.lookup("v1") is None


def test_while_the_hub_does_not_answer_known_files_stay() -> None:
    mount = Mount()
    mount.bucket.put("v1")
    mount.lookup("v1")
    mount.bucket.down = True
    mount.now += 60
    assert mount.lookup("v1") is not None
    with pytest.raises(OSError, match="does not answer"):
        mount.lookup("v2")


def test_creating_over_an_object_that_only_the_bucket_knew_fails() -> None:
    mount = Mount()
    mount.bucket.put("v1")
    with pytest.raises(FileExistsError):
        mount.write("v1")


def test_a_rename_before_the_flush_sends_nothing_and_the_flush_goes_to_the_new_name() -> None:
    mount = Mount()
    node = mount.write("v1.tmp")
    mount.bucket.asked.clear()
    mount.ask(mount.tree.rename("v1.tmp", "v1"))
    assert not [question for question in mount.bucket.asked if isinstance(question, Commit)]
    mount.flush(node)
    assert list(mount.bucket.objects) == ["v1"]


def test_a_rename_during_the_first_upload_ends_under_the_old_name_for_good() -> None:
    mount = Mount()
    node = mount.write("v1.tmp")
    upload = mount.tree.begin_flush([node])
    mount.ask(mount.tree.rename("v1.tmp", "v1"))
    mount.finish_flush(upload)
    assert list(mount.bucket.objects) == ["v1.tmp"]
    assert mount.tree.begin_flush(mount.tree.dirty_nodes()) == [], "the mount thinks that it is done"
    assert mount.lookup("v1") is not None, "the writer still sees its file …"
    mount.now += 10.1
    assert mount.lookup("v1") is None, "… until it asks the bucket"


def test_a_rename_of_a_committed_file_is_sent_at_once() -> None:
    mount = Mount()
    node = mount.write("v1.tmp")
    mount.flush(node)
    etag = mount.bucket.objects["v1.tmp"].etag
    mount.ask(mount.tree.rename("v1.tmp", "v1"))
    assert {key: stat.etag for key, stat in mount.bucket.objects.items()} == {"v1": etag}


def test_a_folder_rename_is_all_additions_and_then_all_deletions() -> None:
    mount = Mount()
    for key in ("tmp/config", "tmp/sub/weights"):
        mount.bucket.put(key)
    mount.lookup("tmp")
    mount.ask(mount.tree.rename("tmp", "v1"))
    (commit,) = [question for question in mount.bucket.asked if isinstance(question, Commit)]
    assert [type(op) for op in commit.operations] == [Add, Add, Delete, Delete]
    assert sorted(mount.bucket.objects) == ["v1/config", "v1/sub/weights"]
    assert mount.names("v1/sub") == ["v1/sub/weights"]


def test_a_rewritten_file_that_is_renamed_leaves_its_old_name_with_the_next_flush() -> None:
    mount = Mount()
    node = mount.write("a")
    mount.flush(node)
    node.changed(2, mount.now)
    mount.ask(mount.tree.rename("a", "b"))
    assert list(mount.bucket.objects) == ["a"]
    mount.flush(node)
    assert list(mount.bucket.objects) == ["b"]


def test_a_file_written_during_its_upload_stays_dirty() -> None:
    mount = Mount()
    node = mount.write("a")
    upload = mount.tree.begin_flush([node])
    node.changed(2, mount.now)
    mount.finish_flush(upload)
    assert mount.tree.dirty_nodes() == [node]


def test_an_unlinked_file_is_gone_here_and_deleted_with_the_next_flush() -> None:
    mount = Mount()
    mount.bucket.put("v1")
    mount.lookup("v1")
    mount.ask(mount.tree.unlink("v1"))
    assert mount.lookup("v1") is None
    assert "v1" in mount.bucket.objects
    assert mount.tree.take_deletes() == (Delete("v1"),)


def test_a_file_unlinked_before_its_flush_is_never_sent() -> None:
    mount = Mount()
    node = mount.write("v1")
    mount.ask(mount.tree.unlink("v1"))
    assert mount.tree.begin_flush([node]) == []
    assert mount.tree.take_deletes() == ()


def test_only_the_mount_that_made_an_empty_folder_sees_it() -> None:
    bucket = Bucket()
    here, there = Mount(bucket=bucket), Mount(bucket=bucket)
    here.ask(here.tree.make_folder("run"))
    assert here.lookup("run").is_folder
    assert there.lookup("run") is None


def test_a_folder_with_entries_is_not_removed() -> None:
    mount = Mount()
    mount.bucket.put("run/v1")
    mount.lookup("run")
    with pytest.raises(OSError) as raised:
        mount.ask(mount.tree.remove_folder("run"))
    assert raised.value.errno == errno.ENOTEMPTY


KEYS = st.sampled_from(["a", "b", "d/a", "d/b"])


class TwoMountsOfOneBucket(RuleBasedStateMachine):
    """A writer's and a reader's mount under any interleaving: what the reader may believe, and for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.bucket = Bucket()
        self.writer, self.reader = Mount(OLD_CACHE, self.bucket), Mount(OLD_CACHE, self.bucket)
        self.uploads: list[list] = []
        self.history: dict[str, list[tuple[float, str | None]]] = {}

    def record(self) -> None:
        for key in ("a", "b", "d/a", "d/b"):
            stat = self.bucket.objects.get(key)
            past = self.history.setdefault(key, [(float("-inf"), None)])
            if past[-1][1] != (stat.etag if stat else None):
                past.append((self.reader.now, stat.etag if stat else None))

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.writer.now += seconds
        self.reader.now += seconds

    @rule(key=KEYS)
    def write(self, key: str) -> None:
        if key.startswith("d/") and self.writer.lookup("d") is None:
            self.writer.ask(self.writer.tree.make_folder("d"))
        node = self.writer.lookup(key)
        if node is None:
            try:
                self.writer.write(key)
            except FileExistsError:
                return
        elif not node.is_folder:
            node.changed(node.size + 1, self.writer.now)

    @rule()
    def begin_upload(self) -> None:
        self.uploads.append(self.writer.tree.begin_flush(self.writer.tree.dirty_nodes()))

    @rule()
    def finish_upload(self) -> None:
        if self.uploads:
            self.writer.finish_flush(self.uploads.pop(0))

    @rule(old=KEYS, new=KEYS)
    def rename(self, old: str, new: str) -> None:
        self.writer.lookup(old)
        try:
            self.writer.ask(self.writer.tree.rename(old, new))
        except (OSError, KeyError):
            return  # a name or the object behind it is gone: the application would see the error

    @rule(key=KEYS)
    def unlink(self, key: str) -> None:
        try:
            self.writer.ask(self.writer.tree.unlink(key))
        except OSError:
            return
        self.bucket.apply(self.writer.tree.take_deletes())

    @rule()
    def list_and_poll(self) -> None:
        self.reader.names("")
        self.reader.tree.apply_poll(
            {k: self.bucket.listing(k) for k in self.reader.tree.folders_to_poll()}, self.reader.now
        )

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        self.record()
        if "/" in key:
            self.reader.lookup("d")
        node, now = self.reader.lookup(key), self.reader.now
        past = self.history[key]
        seen = node.etag if node else None
        # The latest moment at which what the reader was told was still true.
        until = max([after for (_, etag), (after, _) in itertools.pairwise(past) if etag == seen], default=None)
        if past[-1][1] == seen:
            return
        assert until is not None, "the reader was told of a content that the bucket never showed at this key"
        allowed = OLD_CACHE.revalidate_s if node else 2 * OLD_CACHE.negative_ttl_s
        assert now - until <= allowed + 1e-6

    @invariant()
    def clean_files_name_a_content(self) -> None:
        self.record()
        for key in self.history:
            node = self.writer.tree.known(key)
            assert node is None or node.is_folder or node.dirty or node.etag is not None


TwoMountsOfOneBucket.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestTwoMountsOfOneBucket = TwoMountsOfOneBucket.TestCase
