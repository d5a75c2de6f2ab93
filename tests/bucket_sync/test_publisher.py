import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peft_folders import BASE, INCARNATION, RUN
from scripted_proxy import ScriptedProxy

from bucket_grpo.bucket_sync.current import claim
from bucket_grpo.bucket_sync.publisher import Publisher, PublishFailed, PublishLimits, Superseded
from bucket_grpo.bucket_sync.stores import MountedStore, StoreError
from bucket_grpo.bucket_sync.version_file import VersionRejected, verify_version

LIMITS = PublishLimits(store_attempts=3, confirm_s=0.3, live_s=5, proxy_outage_s=3)


@pytest.fixture
def store(tmp_path: Path) -> MountedStore:
    (tmp_path / "bucket").mkdir()
    return MountedStore(tmp_path / "bucket")


@pytest.fixture
def proxy() -> Iterator[ScriptedProxy]:
    proxy = ScriptedProxy()
    yield proxy
    proxy.stop()


@pytest.fixture
def publisher(store: MountedStore, proxy: ScriptedProxy) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def make(**options: object) -> Publisher:
        settings = {"run": RUN, "incarnation": INCARNATION, "base_model": BASE, "max_staleness": 4, "limits": LIMITS}
        made.append(Publisher(options.pop("store", store), proxy.url, **{**settings, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close(timeout=15)


def hold(proxy: ScriptedProxy) -> threading.Event:
    """Versions stay pending until the returned event is set."""
    gate = threading.Event()
    proxy.answer = lambda ref: {"state": "live" if gate.wait(0.05) else "pending"}
    return gate


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_a_version_is_in_the_bucket_before_the_fleet_hears_of_it(publisher, proxy, store, adapter):
    live: list[int] = []
    ours = publisher(on_live=live.append)
    folders = [adapter(seed=seed) for seed in range(3)]
    for number, folder in enumerate(folders, start=1):
        ours.submit(number, step=4 * number, adapter_dir=folder)
        ours.wait_live(number, timeout=15)
    assert [ref.number for ref in proxy.announced] == [1, 2, 3]
    for ref in proxy.announced:
        assert verify_version(store.read(ref.key), expect=ref, base_model=BASE).ref.step == 4 * ref.number
    assert (live, ours.live) == ([1, 2, 3], 3)
    stats = ours.stats()
    assert (stats["publishes"], stats["skipped"], stats["failure"]) == (3, 0, None)
    assert len(stats["publish_to_live_s"]) == 3


def test_submit_returns_at_once_and_then_waits_at_the_bound(publisher, proxy, adapter):
    gate = hold(proxy)
    ours = publisher(max_staleness=4)
    ours.submit(1, 1, adapter(seed=1))
    wait_until(lambda: proxy.announced)
    for number in (2, 3):
        ours.submit(number, number, adapter(seed=number))
    assert ours.live == 0, "nothing was waited for"
    fourth = threading.Thread(target=ours.submit, args=(4, 4, adapter(seed=4)))
    fourth.start()
    fourth.join(0.3)
    assert fourth.is_alive()
    gate.set()
    fourth.join(5)
    ours.wait_live(4, timeout=15)
    stats = ours.stats()
    assert stats["lag_max"] == 3
    assert [ref.number for ref in proxy.announced] in ([1, 3, 4], [1, 4])
    assert stats["skipped"] + stats["publishes"] == 4
    assert max(stats["stall_s"]) > 0.01


def test_live_numbers_ascend_and_come_once(publisher, proxy, adapter):
    live: list[int] = []
    ours = publisher(on_live=live.append, max_staleness=3)
    folder = adapter()
    for number in range(14, 40):
        ours.submit(number, number, folder)
    ours.wait_live(39, timeout=10)
    assert live == sorted(set(live))
    assert live[-1] == 39
    assert ours.stats()["lag_max"] <= 2


def test_with_no_staleness_allowed_submit_waits_until_its_version_is_live(publisher, proxy, adapter):
    ours = publisher(max_staleness=0)
    ours.submit(1, 0, adapter())
    assert ours.live == 1


def test_a_refusal_is_raised_where_the_adapter_was_made(publisher, proxy, adapter):
    ours = publisher()
    with pytest.raises(VersionRejected, match="lora_alpha"):
        ours.submit(1, 0, adapter(lora_alpha=0))
    ours.submit(1, 0, adapter())
    ours.wait_live(1, timeout=15)
    assert [ref.number for ref in proxy.announced] == [1]


def test_a_version_that_failed_everywhere_stops_the_next_publish_with_the_cause(publisher, proxy, adapter):
    proxy.answer = lambda ref: {"state": "failed", "failed_on": {"vllm-1": "bad rank", "vllm-0": "no such file"}}
    ours = publisher()
    ours.submit(1, 7, adapter())
    with pytest.raises(
        PublishFailed, match=r"version 1 \(step 7\) failed on every replica: vllm-0: no such file; vllm-1"
    ):
        ours.wait_live(1, timeout=15)
    with pytest.raises(PublishFailed, match="bad rank"):
        ours.submit(2, 8, adapter())
    assert ours.live == 0


def test_a_waiting_publish_is_freed_by_the_failure_that_it_would_wait_for(publisher, proxy, adapter):
    gate = threading.Event()
    proxy.answer = lambda ref: {"state": "failed" if gate.wait(0.05) else "pending", "reason": "engine died"}
    ours = publisher(max_staleness=2)
    ours.submit(1, 1, adapter())
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(PublishFailed, match="engine died"):
        ours.submit(2, 2, adapter())


def test_a_newer_incarnation_ends_publishing(publisher, proxy, store, adapter):
    claim(store, RUN, INCARNATION)
    ours = publisher()
    ours.submit(1, 1, adapter())
    ours.wait_live(1, timeout=15)
    claim(store, RUN, "20261130t164500z-a1b2c3")
    ours.submit(2, 2, adapter())
    with pytest.raises(Superseded, match="20261130t164500z-a1b2c3 took over"):
        ours.wait_live(2, timeout=15)
    with pytest.raises(Superseded):
        ours.submit(3, 3, adapter())
    assert [ref.number for ref in proxy.announced] == [1]
    assert len(store.list(f"{RUN}/{INCARNATION}/")) == 1


def test_a_proxy_that_forgot_is_told_again(publisher, proxy, adapter):
    answers = iter(["pending", "forget"])

    def answer(ref):
        state = next(answers, "live")
        if state == "forget":
            proxy.forget.set()
            state = "pending"
        return {"state": state}

    proxy.answer = answer
    ours = publisher()
    ours.submit(1, 1, adapter())
    ours.wait_live(1, timeout=15)
    assert [ref.number for ref in proxy.announced] == [1, 1]


def test_a_restart_of_the_proxy_is_survived(publisher, proxy, adapter):
    gate = hold(proxy)
    ours = publisher()
    ours.submit(1, 1, adapter())
    wait_until(lambda: proxy.announced)
    proxy.stop()
    time.sleep(0.5)
    reborn = ScriptedProxy(port=proxy.port)
    try:
        ours.wait_live(1, timeout=15)
        assert [ref.number for ref in reborn.announced] == [1]
        assert ours.stats()["proxy_retries"] > 0
    finally:
        gate.set()
        ours.close(timeout=15)
        reborn.stop()
        proxy.stop = lambda: None


def test_a_proxy_that_stays_away_is_an_error_that_names_it(publisher, proxy, adapter):
    proxy.stop()
    proxy.stop = lambda: None
    ours = publisher(limits=PublishLimits(proxy_outage_s=0.5))
    ours.submit(1, 1, adapter())
    with pytest.raises(PublishFailed, match=f"{proxy.url} gave no good answer"):
        ours.wait_live(1, timeout=15)


class LossyCommits(MountedStore):
    """A mount that loses its first `losses` commits."""

    losses = 0
    writes = 0

    def write_once(self, key: str, data: bytes) -> None:
        self.writes += 1
        super().write_once(key, data)

    def committed_size(self, key: str) -> int | None:
        return None if self.writes <= self.losses else (self.path / key).stat().st_size


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_a_lost_commit_is_written_again_a_bounded_number_of_times(publisher, proxy, store, adapter, losses):
    lossy = LossyCommits(store.path, mounted=True)
    lossy.losses = losses
    ours = publisher(store=lossy)
    ours.submit(1, 1, adapter())
    if losses < LIMITS.store_attempts:
        ours.wait_live(1, timeout=15)
        assert ours.stats()["store_retries"] == losses
    else:
        with pytest.raises(PublishFailed, match="is not in"):
            ours.wait_live(1, timeout=15)
        assert proxy.announced == []


def test_another_version_under_our_name_is_an_error_at_once(publisher, proxy, store, adapter):
    store.write_once(f"{RUN}/{INCARNATION}/v000001.safetensors", b"something else")
    ours = publisher()
    ours.submit(1, 1, adapter())
    with pytest.raises(PublishFailed, match="holds other bytes"):
        ours.wait_live(1, timeout=15)
    assert ours.stats()["store_retries"] == 0


def test_a_full_disk_reaches_the_trainer_as_one_clear_line(publisher, proxy, store, adapter, monkeypatch):
    def full(key: str, data: bytes) -> None:
        raise StoreError("MountedStore(/lora): cannot write: No space left on device ENOSPC")

    monkeypatch.setattr(store, "write_once", full)
    ours = publisher()
    ours.submit(1, 1, adapter())
    with pytest.raises(PublishFailed, match=r"version 1 \(step 1\) did not reach the fleet: .*No space left"):
        ours.wait_live(1, timeout=15)


def test_retiring_is_told_under_trls_name_and_waits_for_nobody(publisher, proxy, adapter):
    gate = hold(proxy)
    ours = publisher()
    ours.submit(7, 1, adapter())
    ours.retire(3)
    wait_until(lambda: proxy.retired)
    assert proxy.retired == ["trl-policy-v3"]
    gate.set()


def test_an_error_in_the_callback_is_not_lost(publisher, proxy, adapter):
    def broken(number: int) -> None:
        raise RuntimeError("the worker is gone")

    ours = publisher(on_live=broken)
    ours.submit(1, 1, adapter())
    with pytest.raises(PublishFailed, match="RuntimeError: the worker is gone"):
        ours.wait_live(1, timeout=15)


def test_close_publishes_what_was_accepted(publisher, proxy, adapter):
    ours = publisher()
    for number in (1, 2, 3):
        ours.submit(number, number, adapter(seed=number))
    ours.close(timeout=15)
    assert ours.live == 3
    with pytest.raises(PublishFailed, match="closed"):
        ours.submit(4, 4, adapter())
