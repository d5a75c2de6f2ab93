from datetime import UTC, datetime, timedelta

import pytest

from bucket_grpo.bucket_sync.current import Superseded, check_fence, claim, current_key, heartbeat, read_current
from bucket_grpo.bucket_sync.stores import MountedStore, StoreError

FIRST, SECOND = "20261130t154500z-a1b2c3", "20261130t164500z-bbbbbb"


@pytest.fixture
def store(tmp_path) -> MountedStore:
    return MountedStore(tmp_path)


def test_a_run_that_nobody_claimed_has_no_owner_and_no_fence(store):
    assert read_current(store, "run") is None
    check_fence(store, "run", FIRST)


def test_the_latest_incarnation_owns_the_run_and_the_earlier_one_may_not_write_over_it(store):
    current = claim(store, "run", FIRST)
    current = heartbeat(store, current)
    newer = claim(store, "run", SECOND)
    with pytest.raises(Superseded, match=SECOND):
        heartbeat(store, current)
    with pytest.raises(Superseded, match=SECOND):
        claim(store, "run", FIRST)
    with pytest.raises(Superseded, match=SECOND):
        check_fence(store, "run", FIRST)
    assert read_current(store, "run") == newer
    check_fence(store, "run", SECOND)


def test_a_heartbeat_keeps_the_start_and_says_how_the_run_ended(store):
    current = claim(store, "run", FIRST)
    ended = heartbeat(store, current, "finished")
    assert read_current(store, "run") == ended
    assert (ended.state, ended.started_at) == ("finished", current.started_at)
    assert ended.heartbeat_at >= current.heartbeat_at
    assert ended.age_s(datetime.now(UTC) + timedelta(seconds=30)) >= 30
    assert ended.age_s(ended.heartbeat_at - timedelta(seconds=5)) == 0


def test_a_pointer_seen_half_written_is_read_again(store, monkeypatch):
    claim(store, "run", FIRST)
    whole = store.read(current_key("run"))
    reads = iter([b"", whole[: len(whole) // 2]])
    monkeypatch.setattr(store, "read", lambda key, max_bytes: next(reads, whole))
    assert read_current(store, "run").incarnation == FIRST


def test_a_pointer_that_stays_unreadable_is_an_error_not_a_licence_to_publish(store):
    store.write_pointer(current_key("run"), b"{}")
    with pytest.raises(StoreError, match="does not say who owns the run"):
        check_fence(store, "run", FIRST)
