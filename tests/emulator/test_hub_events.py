"""The feed of changes: replay, resume, reset, and an end that says where to go on."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket_grpo.emulator.cas import EMPTY_FILE
from bucket_grpo.emulator.events import ChangeLog, Feed, ResumePoint, iso, read_resume_point
from bucket_grpo.emulator.hub_buckets import AddFile, Bucket, Buckets, DeleteFile
from bucket_grpo.emulator.hub_database import Database
from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.objects import ObjectStore

Frame = tuple[str, dict[str, Any]]


class World:
    """A bucket and its feed, with a replay buffer of five changes."""

    def __init__(self, folder: Path) -> None:
        self.database = Database(folder / "hub.sqlite")
        self.log = ChangeLog(self.database, buffer=5)
        self.feed = Feed(self.log, session_s=5, ping_s=0.2)
        objects = ObjectStore(folder, self.database)
        self.buckets = Buckets(self.database, objects, self.log, self.feed.ring)
        try:
            self.bucket: Bucket = self.buckets.get("me", "b")
        except KeyError:
            self.bucket = self.buckets.create("me", "b", private=True)

    def add(self, *paths: str) -> None:
        for path in paths:
            self.buckets.apply(self.bucket, AddFile(type="addFile", path=path, xet_hash=EMPTY_FILE, mtime=1500))

    def delete(self, path: str) -> None:
        self.buckets.apply(self.bucket, DeleteFile(type="deleteFile", path=path))

    async def frames(self, resume: ResumePoint, enough: Callable[[list[Frame]], bool]) -> list[Frame]:
        """What one session says until `enough`, or until the server ends it."""
        self.feed.attach(asyncio.get_running_loop())
        found: list[Frame] = []
        stream: AsyncIterator[bytes] = self.feed.stream(self.bucket.row, resume)
        async for raw in stream:
            if raw.startswith(b":"):
                continue
            event, data = raw.decode().strip().split("\n")
            found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if enough(found):
                break
        return found

    def session(self, resume: ResumePoint = ResumePoint(), until: str = "ready") -> list[Frame]:
        return run(self.frames(resume, lambda found: found[-1][0] == until))

    def resume(self, frames: list[Frame]) -> ResumePoint:
        return read_resume_point(frames[-1][1]["cursor"], None)


def run(coroutine: Coroutine[Any, Any, list[Frame]]) -> list[Frame]:
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def changed(frames: list[Frame]) -> list[tuple[str, str]]:
    return [(change["op"], change["path"]) for _, payload in frames for change in payload.get("changes", [])]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.database.close()


def test_a_live_stream_starts_with_ready_and_no_history(world: World) -> None:
    world.add("before")
    assert [name for name, _ in world.session()] == ["ready"]


def test_a_change_reaches_a_waiting_reader_at_once(world: World) -> None:
    threading.Timer(0.3, lambda: world.add("new")).start()
    frames = world.session(until="changes")
    assert frames[-1][1]["changes"][0] | {"uploadedAt": ""} == {
        "path": "new",
        "op": "add",
        "size": 0,
        "xetHash": EMPTY_FILE,
        "uploadedAt": "",
        "mtime": "1970-01-01T00:00:01.500Z",
    }


def test_a_cursor_resumes_strictly_after_what_it_came_with(world: World) -> None:
    seen = world.session()
    world.add("a", "b", "a")
    world.delete("b")
    world.delete("b")
    replayed = world.session(world.resume(seen))
    assert [name for name, _ in replayed] == ["changes", "ready"]
    assert changed(replayed) == [("add", "a"), ("add", "b"), ("update", "a"), ("delete", "b")]
    assert changed(world.session(world.resume(replayed))) == []


def test_a_cursor_outlives_the_server(world: World, tmp_path: Path) -> None:
    seen = world.session()
    world.add("a")
    again = World(tmp_path)
    assert changed(again.session(world.resume(seen))) == [("add", "a")]
    again.database.close()


def test_an_instant_replays_what_came_after_it(world: World) -> None:
    world.add("a")
    updated_at = world.buckets.get("me", "b").updated_at
    since = read_resume_point(None, iso(updated_at + 0.001))
    assert changed(world.session(since)) == []
    while iso(world.buckets.get("me", "b").updated_at) <= str(iso(updated_at + 0.001)):
        world.add("b")
    assert set(changed(world.session(since))) <= {("add", "b"), ("update", "b")}
    assert ("add", "a") not in changed(world.session(since))


def test_a_resume_point_older_than_the_buffer_is_reset(world: World) -> None:
    seen = world.session()
    world.add("1", "2", "3", "4", "5")
    assert len(changed(world.session(world.resume(seen)))) == 5
    world.add("6")
    assert [name for name, _ in world.session(world.resume(seen))] == ["reset"]
    assert [name for name, _ in world.session(ResumePoint(since=1.0))] == ["reset"]
    assert [name for name, _ in world.session()] == ["ready"]


def test_one_bucket_s_changes_are_not_another_s(world: World) -> None:
    seen = world.session()
    other = world.buckets.create("me", "other", private=True)
    world.buckets.apply(other, AddFile(type="addFile", path="theirs", xet_hash=EMPTY_FILE))
    world.add("ours")
    assert changed(world.session(world.resume(seen))) == [("add", "ours")]


@pytest.mark.parametrize("reason", ["closing", "deleted"])
def test_a_stream_that_must_end_says_where_to_reconnect(world: World, reason: str) -> None:
    world.add("a")
    end = world.feed.close if reason == "closing" else lambda: world.buckets.delete(world.bucket)
    threading.Timer(0.3, end).start()
    frames = world.session(until="reconnect")
    assert [name for name, _ in frames] == ["ready", "reconnect"]
    assert frames[-1][1]["cursor"] == frames[0][1]["cursor"]


@pytest.mark.parametrize(("cursor", "since"), [("nonsense", None), ("c-1", None), (None, "yesterday")])
def test_a_resume_point_that_cannot_be_read_is_400(cursor: str | None, since: str | None) -> None:
    with pytest.raises(HubError) as refused:
        read_resume_point(cursor, since)
    assert refused.value.status == 400
