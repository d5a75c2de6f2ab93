"""Any order of commits, deletions, restarts and garbage collections leaves the Hub with just what was committed."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bucket_grpo.emulator.events import ResumePoint
from bucket_grpo.emulator.hub import Hub
from bucket_grpo.emulator.hub_buckets import AddFile, DeleteFile, Folder, Refused
from tests.emulator.xet_bytes import pack_file

# Names that are prefixes of each other, files that look like folders, and characters that sort oddly.
PATHS = st.sampled_from(["a", "a/b", "a/b/c", "a.txt", "a/", "ab/c", "a#b", "é/ü", "z", "../a"])
CONTENTS = st.binary(max_size=50)


class HubMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="hub-model-"))
        self.hub = Hub(self.folder)
        self.bucket = self.hub.buckets.create("me", "b", private=True)
        self.committed: dict[str, bytes] = {}
        self.followed: dict[str, str] = {}
        self.position = 0

    @rule(path=PATHS, content=CONTENTS)
    def commit(self, path: str, content: bytes) -> None:
        name, (xorb, data), shard = pack_file([content] if content else [])
        if content:
            self.hub.objects.put_xorb(xorb, data)
            self.hub.objects.put_shard(shard)
        try:
            self.hub.buckets.apply(self.bucket, AddFile(type="addFile", path=path, xet_hash=name))
        except Refused:
            assert path in ("a/", "../a")
            return
        self.committed[path] = content

    @rule(path=PATHS)
    def delete(self, path: str) -> None:
        try:
            self.hub.buckets.apply(self.bucket, DeleteFile(type="deleteFile", path=path))
        except Refused:
            assert path in ("a/", "../a")
            return
        self.committed.pop(path, None)

    @rule(content=CONTENTS.filter(bool))
    def upload_and_never_name(self, content: bytes) -> None:
        _, (xorb, data), shard = pack_file([content, b"unnamed"])
        self.hub.objects.put_xorb(xorb, data)
        self.hub.objects.put_shard(shard)

    @rule(content=CONTENTS.filter(bool))
    def name_what_was_never_uploaded(self, content: bytes) -> None:
        name = pack_file([content, b"never uploaded"])[0]
        try:
            self.hub.buckets.apply(self.bucket, AddFile(type="addFile", path="ghost", xet_hash=name))
        except Refused:
            return
        raise AssertionError("a file without content was committed")

    @rule()
    def restart(self) -> None:
        self.hub.close()
        self.hub = Hub(self.folder)
        self.bucket = self.hub.buckets.get("me", "b")

    @rule()
    def collect_garbage(self) -> None:
        self.hub.objects.collect_garbage(older_than_s=0)

    @rule()
    def follow(self) -> None:
        """A reader that resumes from its cursor, now and then, ends up with the bucket as it is."""
        for change in self.hub.log.after(self.bucket.row, self.position):
            self.position = change["seq"]
            if change["op"] == "delete":
                del self.followed[change["path"]]
            else:
                assert (change["op"] == "update") == (change["path"] in self.followed)
                self.followed[change["path"]] = change["xet_hash"]
        shown = {file.path: file.xet_hash for file in self.hub.buckets.files(self.bucket)}
        assert self.followed == shown
        assert self.hub.log.position(self.bucket.row, ResumePoint(after=self.position)) == self.position

    @invariant()
    def the_bucket_shows_what_was_committed(self) -> None:
        files = self.hub.buckets.files(self.bucket)
        assert [file.path for file in files] == sorted(self.committed, key=str.encode)
        for file in files:
            stored = self.hub.objects.file(file.xet_hash)
            assert stored is not None
            assert b"".join(self.hub.objects.read(stored)) == self.committed[file.path]

    @invariant()
    def every_level_of_the_tree_leads_to_every_file(self) -> None:
        found, open_folders = set(), [""]
        while open_folders:
            for entry in self.hub.buckets.children(self.bucket, open_folders.pop()):
                if isinstance(entry, Folder):
                    open_folders.append(f"{entry.path}/")
                else:
                    found.add(entry.path)
        assert found == set(self.committed)

    def teardown(self) -> None:
        self.hub.close()
        shutil.rmtree(self.folder)


TestHubModel = HubMachine.TestCase
TestHubModel.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
