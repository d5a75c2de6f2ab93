"""The released client against the emulated Hub: what HubStore makes of it."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bucket_grpo.bucket_sync.hub_store import HubStore
from bucket_grpo.bucket_sync.stores import Conflict, NotConfirmed, NotFound, StoreError
from bucket_grpo.bucket_sync.watcher import BucketWatcher, Change
from tests.emulator.hubs import RunningHub

KEY = "run/20261130t154500z-a1b2c3/v000001.safetensors"


@pytest.fixture
def store(hub: RunningHub, bucket_id: str) -> HubStore:
    return HubStore(bucket_id, token=hub.token, endpoint=hub.endpoint, request_timeout_s=5, attempts=3)


@pytest.fixture
def faults(hub: RunningHub) -> Iterator[Callable[..., None]]:
    """`faults(kind=…)` puts a fault in force for the rest of the test."""
    yield hub.add_fault
    hub.clear_faults()


def test_a_record_is_written_once_and_reads_back(store):
    data = os.urandom(300_000)
    store.write_once(KEY, data)
    store.confirm(KEY, len(data), timeout_s=5)
    store.write_once(KEY, data)
    for other in (data + b"1", data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(Conflict):
            store.write_once(KEY, other)
    assert store.read(KEY) == data
    with pytest.raises(StoreError, match="more than 10"):
        store.read(KEY, max_bytes=10)


def test_what_is_missing_is_not_found_and_not_confirmed(store):
    with pytest.raises(NotFound):
        store.read(KEY)
    with pytest.raises(NotConfirmed, match="seen: None"):
        store.confirm(KEY, 5, timeout_s=0.2)
    assert store.list("run/") == []


def test_pointers_listing_and_exact_deletion(store):
    store.write_pointer("run/current.json", b'{"a": 1}')
    store.write_pointer("run/current.json", b'{"a": 2}')
    assert store.read("run/current.json") == b'{"a": 2}'
    for key in ("run/a/x", "run/ab/x", "run-2/x"):
        store.write_once(key, b"x")
    assert [info.key for info in store.list("run/")] == ["run/a/x", "run/ab/x", "run/current.json"]
    store.delete(["run/a/x", "run/a/never-there"])
    assert [info.key for info in store.list("")] == ["run-2/x", "run/ab/x", "run/current.json"]


def test_a_folder_of_the_bucket_is_a_store_of_its_own(store, hub):
    store.write_once("team/a/x", b"x")
    folder = HubStore(f"hf://buckets/{store.bucket_id}/team", token=hub.token, endpoint=hub.endpoint)
    assert [info.key for info in folder.list("")] == ["a/x"]
    assert folder.read("a/x") == b"x"


@pytest.mark.parametrize("key", ["../x", "/x", "a/../x", ""])
def test_a_path_that_climbs_out_is_refused_before_any_request(store, key):
    with pytest.raises(StoreError, match="not the key"):
        store.write_once(key, b"x")


@pytest.mark.parametrize("kind", ["fail_operations", "lose_answer", "status"])
def test_errors_that_pass_are_retried_and_a_partial_failure_is_one(store, hub, faults, kind):
    faults(kind=kind, path="*/batch", method="POST", times=1)
    store.write_once(KEY, b"bytes")
    assert [fault["hits"] for fault in hub.faults()] == [1]
    store.confirm(KEY, 5, timeout_s=2)
    assert store.read(KEY) == b"bytes"


def test_a_failure_that_stays_is_an_error_after_a_few_attempts(store, hub, faults):
    faults(kind="fail_operations", times=None)
    with pytest.raises(StoreError, match="BucketBatchError"):
        store.write_once(KEY, b"bytes")
    assert hub.faults()[0]["hits"] == 3


def test_a_commit_that_was_acknowledged_and_dropped_is_not_confirmed(store, faults):
    faults(kind="drop_commit")
    store.write_once(KEY, b"bytes")
    with pytest.raises(NotConfirmed):
        store.confirm(KEY, 5, timeout_s=0.3)
    store.write_once(KEY, b"bytes")
    store.confirm(KEY, 5, timeout_s=2)


def test_a_transfer_that_never_completes_is_given_up(store, hub, faults):
    """The released xet client waits for the missing bytes without end; the deadline is ours."""
    store.write_once(KEY, os.urandom(100_000))
    faults(kind="truncate", keep_bytes=50_000, times=None)
    bounded = HubStore(store.bucket_id, token=hub.token, endpoint=hub.endpoint, transfer_timeout_s=1, attempts=1)
    with pytest.raises(StoreError, match="TimeoutError"):
        bounded.read(KEY)


def test_a_wrong_token_is_one_clear_line(store, hub):
    wrong = HubStore(store.bucket_id, token="hf_wrong", endpoint=hub.endpoint)
    with pytest.raises(StoreError, match=r"cannot look up .*401.*Invalid credentials") as caught:
        wrong.read(KEY)
    assert "\n" not in str(caught.value)


def test_a_hub_that_hangs_is_given_up(store, hub, faults):
    faults(kind="delay", delay_s=30, path="*/paths-info", times=None)
    slow = HubStore(store.bucket_id, token=hub.token, endpoint=hub.endpoint, request_timeout_s=0.3, attempts=1)
    started = time.monotonic()
    with pytest.raises(StoreError, match="TimeoutError"):
        slow.read(KEY)
    assert time.monotonic() - started < 5


def test_the_feed_tells_of_every_change_and_goes_on_after_a_break(store, hub):
    changes: list[Change] = []
    resets, news = [], threading.Semaphore(0)

    def on_change(change: Change) -> None:
        changes.append(change)
        news.release()

    watcher = BucketWatcher(store, on_change, lambda: (resets.append(1), news.release()))
    try:
        assert news.acquire(timeout=5)
        store.write_once("run/a", b"1")
        assert news.acquire(timeout=5)
        started = time.monotonic()
        store.write_once("run/b", b"2")
        assert news.acquire(timeout=5)
        assert time.monotonic() - started < 2
        store.delete(["run/a"])
        assert news.acquire(timeout=5)
    finally:
        watcher.close()
    assert [change.path for change in changes] == ["run/a", "run/b", "run/a"]
    assert changes[-1].op == "delete"
    assert len(resets) == 1


def test_a_feed_that_is_refused_says_so_and_ends(store, hub):
    wrong = HubStore(store.bucket_id, token="hf_wrong", endpoint=hub.endpoint)
    watcher = BucketWatcher(wrong, lambda change: None, lambda: None)
    watcher._thread.join(5)
    assert "401" in str(watcher.failure)
    watcher.close()
