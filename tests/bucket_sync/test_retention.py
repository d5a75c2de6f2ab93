import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.bucket_sync.current import claim
from bucket_grpo.bucket_sync.publisher import Superseded
from bucket_grpo.bucket_sync.retention import Janitor, RetentionRules, RetentionThread, plan_retention
from bucket_grpo.bucket_sync.stores import MountedStore, ObjectInfo, StoreError
from bucket_grpo.bucket_sync.vocabulary import parse_version_key, version_key

NOW = datetime(2026, 11, 30, 18, tzinfo=UTC)
OLD, MINE, NEWER = "20261101t000000z-aaaaaa", "20261130t154500z-a1b2c3", "20261130t164500z-bbbbbb"


def version(incarnation: str, number: int, *, run: str = "run", age_d: float = 0) -> ObjectInfo:
    return ObjectInfo(version_key(run, incarnation, number), 10, NOW - timedelta(days=age_d))


def plan(objects, wanted=(), **rules) -> list[str]:
    chosen = RetentionRules(**{"window": 2, **rules})
    return plan_retention(objects, run="run", incarnation=MINE, wanted=set(wanted), rules=chosen, now=NOW)


def numbers(keys) -> list[int]:
    return [parse_version_key(key)[2] for key in keys]


def test_the_window_every_kth_and_what_is_wanted_stay():
    objects = [version(MINE, number) for number in range(1, 13)]
    wanted = [version_key("run", MINE, 3)]
    assert numbers(plan(objects, wanted, every=5)) == [1, 2, 4, 6, 7, 8, 9]
    assert plan(objects, every=1) == []


def test_an_earlier_incarnation_goes_by_age_except_for_the_runs_newest_version():
    left = [version(OLD, number, age_d=8) for number in (1, 2, 3)]
    assert numbers(plan(left)) == [1, 2]
    assert numbers(plan([*left, version(MINE, 1)])) == [1, 2, 3]
    assert plan([version(OLD, 1, age_d=8), version(OLD, 2, age_d=6)]) == []
    assert plan([ObjectInfo(version_key("run", OLD, n), 1, None) for n in (1, 2)]) == []


def test_nothing_but_versions_of_this_run_is_ever_named():
    others = [version(MINE, n, run="run-2", age_d=99) for n in range(1, 9)]
    newer = [version(NEWER, n, age_d=99) for n in range(1, 9)]
    names = (f"{MINE}/v1.safetensors", f"{MINE}/v000001.safetensors.bak", "current.json", "checkpoints/latest.json")
    foreign = [ObjectInfo(f"run/{name}", 1, NOW - timedelta(days=99)) for name in names]
    assert plan([*others, *newer, *foreign]) == []


@given(
    mine=st.sets(st.integers(1, 60)),
    dead=st.sets(st.integers(1, 60)),
    wanted=st.sets(st.integers(1, 60)),
    window=st.integers(1, 8),
    every=st.integers(0, 7),
    age_d=st.floats(0, 30),
)
def test_whatever_is_there_the_promises_hold(mine, dead, wanted, window, every, age_d):
    objects = [version(MINE, n) for n in mine] + [version(OLD, n, age_d=age_d) for n in dead]
    wanted_keys = {version_key("run", incarnation, n) for n in wanted for incarnation in (MINE, OLD)}
    doomed = plan(objects, wanted_keys, window=window, every=every)
    assert set(doomed) <= {info.key for info in objects}
    assert not set(doomed) & wanted_keys
    kept = [info.key for info in objects if info.key not in doomed]
    assert {version_key("run", MINE, n) for n in sorted(mine)[-window:]} <= set(kept)
    if objects:
        assert max(info.key for info in objects) in kept
    expected = window + len(wanted & mine) + (60 // every if every else 0)
    assert sum(MINE in key for key in kept) <= expected
    # Doing it twice changes nothing more.
    assert plan([info for info in objects if info.key in kept], wanted_keys, window=window, every=every) == []


@pytest.mark.parametrize(("window", "every"), [(0, 0), (1, -1)])
def test_rules_that_keep_nothing_are_refused(window, every):
    with pytest.raises(ValueError):
        RetentionRules(window=window, every=every)


def test_a_sweep_deletes_exactly_what_was_planned_and_is_fenced(tmp_path):
    store = MountedStore(tmp_path)
    for number in range(1, 9):
        store.write_once(version_key("run", MINE, number), b"x")
    store.write_once(version_key("run-2", MINE, 1), b"x")
    claim(store, "run", MINE)
    janitor = Janitor(store, "run", MINE, lambda: {version_key("run", MINE, 2)}, RetentionRules(window=3))
    assert numbers(janitor.sweep()) == [1, 3, 4, 5]
    assert janitor.sweep() == []
    left = [info.key for info in store.list("run/")]
    assert left == [*(version_key("run", MINE, n) for n in (2, 6, 7, 8)), "run/current.json"]
    assert len(store.list("run-2/")) == 1

    claim(store, "run", NEWER)
    with pytest.raises(Superseded):
        janitor.sweep()


def test_a_thread_sweeps_until_it_is_superseded_and_survives_errors(tmp_path):
    store = MountedStore(tmp_path)
    claim(store, "run", MINE)
    for number in range(1, 9):
        store.write_once(version_key("run", MINE, number), b"x")
    failing = iter([StoreError("the mount is away")])

    def wanted() -> set[str]:
        for error in failing:
            raise error
        return set()

    thread = RetentionThread(Janitor(store, "run", MINE, wanted, RetentionRules(window=2)), interval_s=0.02)
    deadline = time.monotonic() + 5
    while len(store.list(f"run/{MINE}/")) > 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (numbers(info.key for info in store.list(f"run/{MINE}/")), thread.failures) == ([7, 8], 1)
    claim(store, "run", NEWER)
    thread._thread.join(5)
    assert not thread._thread.is_alive()
    thread.close()


def test_a_proxy_that_does_not_answer_costs_no_version(tmp_path):
    store = MountedStore(tmp_path)
    for number in range(1, 9):
        store.write_once(version_key("run", MINE, number), b"x")

    def silent() -> set[str]:
        raise ConnectionError("no answer")

    with pytest.raises(ConnectionError):
        Janitor(store, "run", MINE, silent, RetentionRules(window=1)).sweep()
    assert len(store.list("")) == 8
