"""The signal that wakes waiters, and the file that a restarted proxy reads."""

import asyncio
from pathlib import Path

import pytest
from proxy_harness import INCARNATION, ref

from bucket_grpo.proxy.change import Signal
from bucket_grpo.proxy.version_log import VersionLog


@pytest.mark.anyio
async def test_a_signal_wakes_all_who_wait_and_nobody_later() -> None:
    signal = Signal()
    waiters = [asyncio.create_task(signal.wait(5)) for _ in range(3)]
    await asyncio.sleep(0)
    signal.fire()
    assert await asyncio.gather(*waiters) == [True, True, True]
    assert await signal.wait(0.01) is False
    assert await signal.wait(0) is False


@pytest.mark.anyio
async def test_a_cancelled_waiter_is_cancelled_and_not_merely_timed_out() -> None:
    signal = Signal()
    waiter = asyncio.create_task(signal.wait(5))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


def test_what_was_announced_is_read_back(tmp_path: Path) -> None:
    log = VersionLog(tmp_path, INCARNATION)
    assert log.read().refs == []
    log.accepted(ref(1))
    log.accepted(ref(2))
    log.unloaded(1)
    log.replicas(["http://a", "http://b"])
    announced = VersionLog(tmp_path, INCARNATION).read()
    assert announced.refs == [ref(1), ref(2)]
    assert announced.unloaded == {1}
    assert announced.replicas == ["http://a", "http://b"]


def test_a_line_that_a_kill_cut_off_costs_only_itself(tmp_path: Path) -> None:
    log = VersionLog(tmp_path, INCARNATION)
    log.accepted(ref(1))
    log.accepted(ref(2))
    whole = log.path.read_bytes()
    for cut in range(len(whole)):
        log.path.write_bytes(whole[:cut])
        log.accepted(ref(3))
        refs = log.read().refs
        assert refs[-1] == ref(3)
        assert refs[:-1] == [ref(1), ref(2)][: len(refs) - 1]


def test_another_start_of_the_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    VersionLog(tmp_path, INCARNATION).accepted(ref(1))
    assert VersionLog(tmp_path, "20261130t154501z-a1b2c3").read().refs == []
