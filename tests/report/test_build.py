import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_folders import journal_entry, metrics_rows, write_lines, write_run

from bucket_grpo.report.build import build_report
from bucket_grpo.report.figures import compose, gather
from bucket_grpo.report.files import BrokenFile
from bucket_grpo.report.schema import Report

# The names that scripts read. One may be added; none may go or change its meaning without a new schema_version.
PROMISED = [
    "schema_version",
    "run",
    "variant",
    "exit_reason",
    "seed",
    "versions",
    "steps",
    "wall_clock_s",
    "time_to_first_step_s",
    "step_s_p50",
    "fwd_bwd_s_p50",
    "stall_s_p50",
    "stall_s_total",
    "rollout_wait_s_total",
    "publish_to_live_s_p50",
    "queue_mean",
    "staleness_mean",
    "staleness_max",
    "dropped_stale_frac",
    "lag_max",
    "reward_first20",
    "reward_last20",
    "rewards",
    "zero_std_frac",
    "clipped_frac",
    "abs_log_ratio_mean",
    "abs_log_ratio_max",
    "samples",
    "generated_tokens",
    "generated_tok_s",
    "publishes",
    "skipped",
    "loads",
    "load_retries",
    "load_failures",
    "replica_restarts",
    "routing",
    "audited_samples",
    "wrong_policy_samples",
    "groups",
    "eval",
    "cost_usd",
    "idle_usd",
    "adapter_uri",
]


def figures(run: Path) -> dict[str, Any]:
    """What `report.json` would hold, without drawing the pictures."""
    return compose(gather(run)).model_dump(mode="json")


def test_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    report = figures(write_run(tmp_path / "run"))

    assert report["run"] == "tiny"
    assert (report["seed"], report["steps"], report["exit_reason"]) == (3, 100, "finished")
    assert report["reward_first20"] == pytest.approx(0.105)
    assert report["reward_last20"] == pytest.approx(0.905)
    assert report["rewards"] == pytest.approx({"exact": 0.905, "short": 1.0})
    assert report["step_s_p50"] == 0.4
    assert report["rollout_wait_s_total"] == pytest.approx(5.0)
    assert report["staleness_mean"] == pytest.approx(1.5)
    assert report["dropped_stale_frac"] == pytest.approx(10 / 6410)
    assert report["publish_to_live_s_p50"] == 2.0
    assert (report["samples"], report["generated_tokens"]) == (6400, 4005)
    assert report["generated_tok_s"] == pytest.approx(50.06, abs=0.01)
    assert (report["loads"], report["load_retries"], report["load_failures"]) == (52, 2, 0)
    assert report["routing"]["parked"] == 2
    assert (report["audited_samples"], report["wrong_policy_samples"], report["power_frac"]) == (48, 0, 0.96)
    assert report["adapter_uri"] == "hf://buckets/me/rl/tiny/20261130t154500z-a1b2c3/v000026.safetensors"


def test_every_promised_name_is_there_in_every_report(tmp_path: Path) -> None:
    full, empty = figures(write_run(tmp_path / "full")), figures(_empty_run(tmp_path))

    assert set(PROMISED) <= set(full)
    assert full.keys() == empty.keys() == Report.model_fields.keys()


def test_what_is_unknown_is_null_and_never_zero(tmp_path: Path) -> None:
    report = figures(_empty_run(tmp_path))
    known = {name: value for name, value in report.items() if value is not None}

    assert report["run"] == "run-of-nothing"
    assert known.keys() == {"schema_version", "run", "versions", "rewards", "routing", "groups", "eval"}
    assert not any(report["routing"].values())
    assert 0 not in report["routing"].values()


def test_the_wait_for_the_first_version_is_no_stall(tmp_path: Path) -> None:
    report = figures(write_run(tmp_path / "run"))

    assert report["stall_s_p50"] == 0.02
    assert report["stall_s_total"] == pytest.approx(25 * 0.02)


def test_in_trls_own_order_the_stall_is_trls_weight_sync(tmp_path: Path) -> None:
    rows = [row | {"bucket_grpo/stall_s": None, "perf/weight_sync_s": 6.0} for row in metrics_rows(5)]
    write_lines(tmp_path / "metrics.jsonl", rows)

    assert figures(tmp_path)["stall_s_p50"] == 6.0


def test_nothing_dropped_is_zero_where_staleness_was_watched(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", metrics_rows(7))

    assert figures(tmp_path)["dropped_stale_frac"] == 0.0


def test_a_step_that_was_done_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    again = [row | {"reward": 1.0} for row in metrics_rows(30) if row["step"] > 20]
    write_lines(tmp_path / "metrics.jsonl", [*metrics_rows(25), *again])
    report = figures(tmp_path)

    assert (report["steps"], report["samples"]) == (30, 30 * 64)
    assert report["reward_last20"] == pytest.approx((sum(range(11, 21)) / 100 + 10) / 20)


def test_a_restarted_proxy_does_not_make_requests_vanish(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "proxy_status.json").write_text(json.dumps({"routing": {"requests": 3, "affinity": 3, "failed": 0}}))
    write_lines(
        run / "journal" / "journal-8-20261130t155000z.jsonl", [journal_entry(i, retries=2, late=True) for i in range(9)]
    )
    with (run / "journal" / "journal-8-20261130t155000z.jsonl").open("a") as file:
        file.write('{"id": "cut of')
    routing = figures(run)["routing"]

    assert (routing["requests"], routing["retried"], routing["late"]) == (810, 9, 9)
    assert routing["parked"] is None


def test_a_log_interval_of_ten_steps_still_averages_twenty_steps(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [row for row in metrics_rows(100) if row["step"] % 10 == 0])
    report = figures(tmp_path)

    assert report["reward_first20"] == pytest.approx(0.15)
    assert report["reward_last20"] == pytest.approx(0.95)


def test_a_corrupt_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"exit_reason": ')
    with pytest.raises(BrokenFile, match=r"outcome\.json is not JSON"):
        figures(tmp_path)


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        figures(tmp_path / "nowhere")


def test_the_folder_holds_a_report_a_picture_and_a_page_that_needs_nothing_else(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    report = build_report(run)
    page = (run / "report.html").read_text()

    assert json.loads((run / "report.json").read_text()) == report
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "0.105 → 0.905 (+0.800" in page
    assert not re.search(r"https?://|<script|<link", page)
    assert not list(run.glob(".*"))


def test_names_from_the_run_cannot_break_the_page(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run_name: <b>bold</b>\n")
    build_report(tmp_path)

    assert "<b>" not in (tmp_path / "report.html").read_text()


def _empty_run(tmp_path: Path) -> Path:
    run = tmp_path / "run-of-nothing"
    run.mkdir()
    return run
