"""The pure rules: durations, prices, memory, budgets, and which replicas are started again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.bucket_sync.vocabulary import mint_incarnation
from bucket_grpo.jobs.actions import later_incarnation
from bucket_grpo.jobs.budget import BudgetWatch
from bucket_grpo.jobs.fleet import MAX_STARTS, MISSING_LOOKS, FleetWatch, replica_url
from bucket_grpo.jobs.hardware import DOCUMENTED_FLAVORS, UnknownFlavor, documented_prices, prices_from
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.settings import Budget, seconds
from bucket_grpo.jobs.travel import local_files
from bucket_grpo.jobs.vram import replica_vram, shape_of, trainer_vram

H200 = documented_prices().flavor("h200")
T4 = documented_prices().flavor("t4-small")


def test_durations() -> None:
    assert [seconds(text) for text in ("90", "90s", "15m", "1.5h", "1d", 30)] == [90, 90, 900, 5400, 86400, 30]
    for wrong in ("", "h", "4 hours", "-1m", "0s", "1w"):
        with pytest.raises(ValueError):
            seconds(wrong)


def test_an_unknown_flavor_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(UnknownFlavor, match=r"'h200x2'.*cpu-basic"):
        documented_prices().flavor("h200-x2")


def test_the_hubs_price_list_gives_the_documented_prices() -> None:
    from huggingface_hub import JobHardwareInfo  # type: ignore[attr-defined]

    from bucket_grpo.emulator.jobs_hardware import hardware

    listed = prices_from(JobHardwareInfo(**item) for item in hardware())
    assert {f.name: (f.usd_per_hour, f.gpus, f.vram_gib) for f in listed.flavors} == {
        f.name: (f.usd_per_hour, f.gpus, f.vram_gib) for f in DOCUMENTED_FLAVORS
    }


def test_memory_of_the_reference_fits_where_it_ran_and_not_on_the_smallest_card() -> None:
    shape = shape_of("Qwen/Qwen2.5-Math-1.5B")
    assert shape is not None
    fits = replica_vram(shape, H200, "bfloat16", 4096)
    assert fits.fits
    assert fits.weights_gib == pytest.approx(2.87, abs=0.01)
    assert (fits.kv_cache_tokens or 0) > 384 * 4096
    assert trainer_vram(shape, H200, "bfloat16", 16384, False).fits
    assert not trainer_vram(shape, T4, "bfloat16", 16384, False).fits


def test_an_unknown_model_has_no_estimate() -> None:
    assert shape_of("somebody/their-model") is None


def watch(**budget: Any) -> BudgetWatch:
    return BudgetWatch(Budget(**budget), usd_per_hour=36.0, reserve_s=10.0)


def test_the_budget_ends_a_run_before_it_is_overspent() -> None:
    assert watch(max_usd=1.0).why_stop(0, 0.89, 5) is None
    assert "max_usd" in (watch(max_usd=1.0).why_stop(0, 0.90, 5) or "")


def test_no_progress_counts_from_the_first_step() -> None:
    limited = watch(no_progress="10s")
    assert limited.why_stop(100, 0, None) is None
    assert limited.why_stop(200, 0, 1) is None
    assert limited.why_stop(209, 0, 1) is None
    assert limited.why_stop(209.5, 0, 2) is None
    assert limited.why_stop(219, 0, 2) is None
    assert "no progress" in (limited.why_stop(219.5, 0, 2) or "")


@given(st.lists(st.floats(0, 0.01), max_size=200), st.floats(0.01, 1))
def test_a_run_under_watch_never_costs_more_than_its_budget(spent: list[float], limit: float) -> None:
    """As long as ending it takes no longer, and no look costs more, than the reserve."""
    limited, total = watch(max_usd=limit), 0.0
    for usd in spent:
        total += usd
        if limited.why_stop(0, total, None):
            break
        assert total + 0.1 < limit


def job(part: str, stage: str, *, url: str | None = None, aliases: list[str] | None = None) -> Any:
    return SimpleNamespace(
        labels={
            "app": "bucket-grpo",
            "run": "r",
            "incarnation": "20261130t154500z-a1b2c3",
            "role": "vllm",
            "part": part,
        },
        status=SimpleNamespace(stage=stage, expose_urls=[url] if url else None, message=None),
        network=SimpleNamespace(group="g", aliases=aliases) if aliases else None,
        id=part,
    )


def test_urls_are_those_of_running_replicas(plan: Plan) -> None:
    jobs = [job("vllm-1", "RUNNING", url="https://b--8000.hf.jobs/"), job("vllm-0", "SCHEDULING")]
    assert FleetWatch(plan).urls(jobs) == ["https://b--8000.hf.jobs"]


def test_in_a_private_network_a_replica_is_its_alias() -> None:
    url = replica_url(job("vllm-0", "RUNNING", aliases=["vllm-0"]), {"HF_NETWORK_GROUP_PREFIX": "g-"})
    assert url == "http://g-vllm-0:8000"


def test_a_failed_replica_is_started_again_a_few_times_and_a_cancelled_one_is_not(plan: Plan) -> None:
    fleet = FleetWatch(plan)
    looks = [fleet.lost([job("vllm-0", "ERROR"), job("vllm-1", "CANCELED")]) for _ in range(MAX_STARTS + 2)]
    assert looks == [[0]] * (MAX_STARTS - 1) + [[]] * 3
    assert fleet.given_up == {"vllm-0"}


def test_a_replica_that_is_missing_once_is_not_lost_yet(plan: Plan) -> None:
    fleet = FleetWatch(plan)
    both = [job("vllm-0", "RUNNING"), job("vllm-1", "RUNNING")]
    assert fleet.lost(both) == []
    assert fleet.lost(both[1:]) == []
    assert fleet.lost(both) == []
    assert [fleet.lost(both[1:]) for _ in range(MISSING_LOOKS)][-1] == [0]


def test_a_started_again_replica_is_not_started_a_third_time_while_it_waits(plan: Plan) -> None:
    fleet = FleetWatch(plan)
    assert fleet.lost([job("vllm-0", "ERROR"), job("vllm-1", "RUNNING")]) == [0]
    assert fleet.lost([job("vllm-0", "ERROR"), job("vllm-1", "RUNNING"), job("vllm-0", "SCHEDULING")]) == []


def test_the_users_files_travel_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def brevity(completions, **_): return [0.0]")
    (tmp_path / "data.jsonl").write_text("{}")
    rewards = ["bucket_grpo.trainer.rewards:boxed_math", "./mine.py:brevity"]
    found = local_files(rewards, "data.jsonl", tmp_path)
    assert {name: path.name for name, path in found.items()} == {"./mine.py": "mine.py", "data.jsonl": "data.jsonl"}
    with pytest.raises(ValueError, match=r"gone\.py"):
        local_files(["gone.py:f"], None, tmp_path)
    assert local_files([], "sail/Sanity-Test-R1D-1.5B", tmp_path) == {}


def test_a_resumed_run_sorts_after_the_one_before_whatever_the_clocks_say() -> None:
    for old in (mint_incarnation(), "29991231t235958z-ffffff"):
        assert later_incarnation(old) > old
