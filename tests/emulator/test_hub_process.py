"""The served Hub as a process: it is killed at any moment, restarted, and has everything that it acknowledged."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.emulator.hub_clients import client_of
from tests.emulator.hubs import RunningHub, running_hub, start_hub
from tests.emulator.xet_bytes import pack_file


class Uploader:
    """A small client for one bucket, which gives up at once when the server does not answer."""

    def __init__(self, hub: RunningHub, bucket: str) -> None:
        self.url = f"{hub.endpoint}/api/buckets/{bucket}"
        self.resolve = f"{hub.endpoint}/buckets/{bucket}/resolve"
        self.http = httpx.Client(headers={"Authorization": f"Bearer {hub.token}"}, timeout=10, follow_redirects=True)

    def add(self, path: str, content: bytes) -> None:
        name, (xorb, data), shard = pack_file([content])
        access = self.http.get(f"{self.url}/xet-write-token").raise_for_status().json()
        cas = {"Authorization": f"Bearer {access['accessToken']}"}
        for route, body in ((f"v1/xorbs/default/{xorb}", data), ("v1/shards", shard)):
            self.http.post(f"{access['casUrl']}/{route}", content=body, headers=cas).raise_for_status()
        operation = json.dumps({"type": "addFile", "path": path, "xetHash": name})
        report = self.http.post(f"{self.url}/batch", content=operation).raise_for_status().json()
        assert report["success"]

    def read(self, path: str) -> bytes:
        return self.http.get(f"{self.resolve}/{path}").raise_for_status().content


def content_of(path: str) -> bytes:
    return hashlib.sha256(path.encode()).digest() * 3000


def test_a_killed_server_has_everything_that_it_acknowledged(tmp_path: Path) -> None:
    hub = start_hub(tmp_path / "hub")
    port = int(hub.endpoint.rsplit(":", 1)[1])
    try:
        hub.create_bucket("me/b")
        acknowledged: list[str] = []
        for round_number in range(4):

            def upload(worker: int, hub: RunningHub = hub, round_number: int = round_number) -> None:
                uploader = Uploader(hub, "me/b")
                for i in range(10_000):
                    path = f"{round_number}/{worker}/{i}"
                    try:
                        uploader.add(path, content_of(path))
                    except (httpx.HTTPError, OSError):
                        return
                    acknowledged.append(path)

            workers = [threading.Thread(target=upload, args=(worker,)) for worker in range(3)]
            for worker in workers:
                worker.start()
            time.sleep(0.4)
            hub.kill()
            for worker in workers:
                worker.join(30)
            hub.stop()
            hub = start_hub(tmp_path / "hub", port=port)

        assert len(acknowledged) > 10
        shown = hub.paths("me/b")
        assert set(acknowledged) <= set(shown)
        reader = Uploader(hub, "me/b")
        # Also what was committed without an answer must be whole.
        for path in shown:
            assert reader.read(path) == content_of(path)
    finally:
        hub.stop()


def test_tokens_buckets_and_hidden_commits_outlive_a_kill(tmp_path: Path) -> None:
    hub = start_hub(tmp_path / "hub")
    hub.create_bucket("me/b")
    hub.add_fault(kind="hide", delay_s=1.5)
    Uploader(hub, "me/b").add("later", b"later")
    hub.kill()
    hub.stop()
    again = start_hub(tmp_path / "hub")
    try:
        assert again.tokens == hub.tokens
        assert again.faults() == []
        give_up = time.monotonic() + 20
        while again.paths("me/b") != ["later"]:
            assert time.monotonic() < give_up
            time.sleep(0.1)
    finally:
        again.stop()


def test_two_servers_never_share_a_folder(tmp_path: Path) -> None:
    with running_hub(tmp_path):
        command = [sys.executable, "-m", "bucket_grpo.emulator", "serve", "--root", str(tmp_path / "hub")]
        second = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert second.returncode == 2
    assert "another emulated Hub runs on" in second.stderr


@pytest.mark.parametrize("fault", ["not json", '{"kind": "earthquake"}'])
def test_a_fault_that_cannot_be_read_stops_the_start(tmp_path: Path, fault: str) -> None:
    command = [sys.executable, "-m", "bucket_grpo.emulator", "serve", "--root", str(tmp_path / "hub"), "--fault", fault]
    started = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert started.returncode == 2
    assert "cannot serve" in started.stderr


def test_faults_can_be_given_at_the_start(tmp_path: Path) -> None:
    fault = '{"kind": "status", "status": 429, "path": "/api/whoami-v2"}'
    with running_hub(tmp_path, "--fault", fault) as hub:
        headers = {"Authorization": f"Bearer {hub.token}"}
        answers = [httpx.get(f"{hub.endpoint}/api/whoami-v2", headers=headers).status_code for _ in range(2)]
        assert answers == [429, 200]


def events(hub: RunningHub, bucket: str, query: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """The events of one session, until the server ends it."""
    url = f"{hub.endpoint}/api/buckets/{bucket}/events{query}"
    with httpx.stream("GET", url, headers={"Authorization": f"Bearer {hub.token}"}, timeout=30) as stream:
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))


def test_a_commit_is_an_event_at_once_and_a_stop_says_where_to_go_on(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        hub.create_bucket("me/b")
        uploader = Uploader(hub, "me/b")
        feed = events(hub, "me/b")
        name, ready = next(feed)
        assert name == "ready"
        uploader.add("a", b"first")
        committed = time.monotonic()
        name, changes = next(feed)
        assert name == "changes"
        assert time.monotonic() - committed < 0.5
        hub.process.terminate()
        name, reconnect = next(feed)
        assert (name, reconnect["cursor"]) == ("reconnect", changes["cursor"])
        assert hub.process.wait(10) == 0

        again = start_hub(tmp_path / "hub")
        try:
            replayed = events(again, "me/b", f"?cursor={ready['cursor']}")
            assert next(replayed) == ("changes", changes)
            assert next(events(again, "me/b", f"?cursor={reconnect['cursor']}"))[0] == "ready"
        finally:
            again.stop()


@pytest.mark.e2e
def test_the_client_survives_a_restart_of_the_hub(tmp_path: Path) -> None:
    """An upload that meets a dead server is tried again by the client and succeeds once the server is back."""
    hub = start_hub(tmp_path / "hub")
    port = int(hub.endpoint.rsplit(":", 1)[1])
    hub.create_bucket("me/b")
    client = client_of("1", hub, tmp_path / "home")
    hub.kill()
    hub.stop()
    writing = client.start("api.batch_bucket_files('me/b', add=[(b'x' * 100_000, 'a')])")
    time.sleep(2)
    again = start_hub(tmp_path / "hub", port=port)
    try:
        _, errors = writing.communicate(timeout=90)
        assert writing.returncode == 0, errors
        assert again.paths("me/b") == ["a"]
    finally:
        writing.kill()
        again.stop()
