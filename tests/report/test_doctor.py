"""The doctor against two published runs (async GRPO with LoRA on H200s, September 2026), and against runs that are slow
or learn nothing for one reason each."""

from dataclasses import replace
from pathlib import Path

import pytest
from run_folders import metrics_rows, write_run

from bucket_grpo.report.doctor import Diagnosis, diagnose
from bucket_grpo.report.figures import RunFiles, gather
from bucket_grpo.report.signals import Signals, signals

PUBLISHED_RUN_1 = Signals(
    steps=500, step_s=22.9, fwd_bwd_s=21.9, rollout_wait_s=0.0, stall_s=8.5, weight_sync_steps=4, mfu=0.039,
    queue_mean=476, queue_maxsize=512, max_inflight_tasks=128, replicas=2, samples_per_step=128, samples_per_row=1.0,
    gradient_checkpointing=True, max_model_len=4096, reward_first20=0.145, reward_last20=0.438,
)  # fmt: skip
PUBLISHED_RUN_5 = Signals(
    steps=500, step_s=4.8, fwd_bwd_s=4.6, rollout_wait_s=0.0, stall_s=6.2, weight_sync_steps=4, mfu=0.235,
    queue_mean=690, queue_maxsize=768, max_inflight_tasks=384, replicas=3, samples_per_step=168, samples_per_row=6.0,
    gradient_checkpointing=False, max_model_len=4096, reward_first20=0.145, reward_last20=0.416,
)  # fmt: skip
HEALTHY = Signals(
    steps=200, step_s=1.0, fwd_bwd_s=0.8, rollout_wait_s=0.02, stall_s=0.03, weight_sync_steps=4, queue_mean=250,
    queue_maxsize=512, backpressure_frac=0.0, inflight=60, max_inflight_tasks=256, replicas=2, score_busy_frac=0.1,
    samples_per_step=64, samples_per_row=8, reward_first20=0.25, reward_last20=0.75, reward_max=0.9, zero_std_frac=0.3,
    clipped_frac=0.01, dropped_stale_frac=0.0, learning_rate=1e-4, max_completion_length=512, num_generations=8,
)  # fmt: skip
STARVED = replace(HEALTHY, rollout_wait_s=0.6, fwd_bwd_s=0.3, queue_mean=5)
FLAT = replace(HEALTHY, reward_first20=0.25, reward_last20=0.25)


def keys(diagnosis: Diagnosis) -> set[str]:
    return {change.key for change in diagnosis.findings[0].changes}


def test_the_first_published_run_is_told_what_its_authors_did_next() -> None:
    diagnosis = diagnose(PUBLISHED_RUN_1)

    assert diagnosis.verdict == "trainer-bound"
    assert keys(diagnosis) == {"token_budget", "gradient_checkpointing"}
    assert "the queue is full: 476 of 512 samples" in diagnosis.findings[0].evidence


def test_in_the_tuned_published_run_the_stop_for_each_publish_is_what_is_left() -> None:
    diagnosis = diagnose(PUBLISHED_RUN_5)
    deferred = diagnosis.findings[0].changes[0]

    assert diagnosis.verdict == "publish-bound"
    assert deferred.predicted_step_s == pytest.approx(4.8)
    assert [finding.verdict for finding in diagnosis.findings] == ["publish-bound", "trainer-bound"]


@pytest.mark.parametrize(("run", "published_s"), [(PUBLISHED_RUN_1, 12_420), (PUBLISHED_RUN_5, 3_180)])
def test_step_and_stall_add_up_to_the_published_wall_clock(run: Signals, published_s: float) -> None:
    assert run.cycle_s is not None
    assert 500 * run.cycle_s == pytest.approx(published_s, rel=0.02)


def test_a_run_that_learns_and_waits_for_nothing_is_balanced() -> None:
    diagnosis = diagnose(HEALTHY)

    assert diagnosis.verdict == "balanced"
    assert not diagnosis.findings[0].changes


def test_an_empty_queue_and_waiting_ask_for_a_replica_and_predict_the_step() -> None:
    diagnosis = diagnose(STARVED)
    change = diagnosis.findings[0].changes[0]

    assert (diagnosis.verdict, change.key, change.value) == ("generation-bound", "jobs.vllm.replicas", "3")
    assert change.predicted_step_s == pytest.approx(1.0075 * 2 / 3)


def test_no_number_of_replicas_makes_a_step_shorter_than_its_training() -> None:
    change = diagnose(replace(STARVED, replicas=1, rollout_wait_s=0.2)).findings[0].changes[0]

    assert change.predicted_step_s == pytest.approx(1.0075 - 0.2)


def test_a_pinned_cap_is_raised_before_a_replica_is_bought() -> None:
    diagnosis = diagnose(replace(STARVED, inflight=255.0))

    assert diagnosis.verdict == "client-capped"
    assert keys(diagnosis) == {"max_inflight_tasks"}


def test_busy_reward_functions_are_not_taken_for_slow_replicas() -> None:
    diagnosis = diagnose(replace(STARVED, inflight=255.0, score_busy_frac=0.97))

    assert diagnosis.verdict == "reward-bound"
    assert keys(diagnosis) == {"reward_funcs"}


def test_held_back_samples_show_a_slow_trainer_even_where_the_queues_size_is_unknown() -> None:
    diagnosis = diagnose(replace(HEALTHY, queue_maxsize=None, backpressure_frac=0.9))

    assert diagnosis.verdict == "trainer-bound"


def test_a_reward_of_zero_is_for_the_reward_function_not_the_learning_rate() -> None:
    diagnosis = diagnose(replace(FLAT, reward_first20=0.0, reward_last20=0.0, reward_max=0.0))

    assert diagnosis.verdict == "not-learning"
    assert keys(diagnosis) == {"reward_funcs"}


def test_answers_cut_off_by_the_limit_ask_for_a_longer_one() -> None:
    change = diagnose(replace(FLAT, clipped_frac=0.6)).findings[0].changes[0]

    assert (change.key, change.value) == ("max_completion_length", "1024")


def test_groups_without_differences_ask_for_more_rollouts() -> None:
    assert keys(diagnose(replace(FLAT, zero_std_frac=0.9))) == {"num_generations"}


def test_a_flat_reward_that_varies_asks_for_larger_steps_and_a_falling_one_for_smaller() -> None:
    flat, falling = diagnose(FLAT), diagnose(replace(FLAT, reward_last20=0.1))

    assert flat.findings[0].changes[0].value == "3.0e-04"
    assert falling.findings[0].changes[0].value == "a third"


def test_a_short_run_is_not_judged_on_learning() -> None:
    assert diagnose(replace(FLAT, steps=30)).verdict == "balanced"


def test_a_run_that_learns_nothing_is_still_told_what_is_slow() -> None:
    diagnosis = diagnose(replace(STARVED, reward_last20=0.25))

    assert [finding.verdict for finding in diagnosis.findings] == ["not-learning", "generation-bound"]


def test_dropped_samples_are_named_beside_the_bottleneck() -> None:
    assert diagnose(replace(HEALTHY, dropped_stale_frac=0.1)).findings[0].verdict == "stale"


def test_nothing_recorded_gives_no_verdict() -> None:
    assert diagnose(Signals()).verdict == "unknown"


def test_the_signals_of_a_run_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "run.yaml").write_text(
        "queue_maxsize: 400\nweight_sync_steps: 4\nmax_inflight_tasks: -1\nnum_generations: 8\n"
    )
    found = signals(gather(run))

    assert found.cycle_s == pytest.approx(0.4)
    assert (found.stall_s, found.replicas, found.max_inflight_tasks) == (pytest.approx(0.02), 2, None)
    assert found.queue_fill == 0.25
    assert diagnose(found).verdict == "generation-bound"  # it waits 0.05 s of 0.4 s


def test_events_are_counted_over_the_steps_that_could_have_shown_them() -> None:
    rows = metrics_rows(100)
    for row in rows:
        row["rollout/inflight"] = 50.0
        row["rollout/score_s"] = 0.04  # 8 groups a step
        if row["step"] % 2:
            row["rollout/backpressure_s"] = 0.3
    found = signals(RunFiles("x", rows=rows, run_file={"num_generations": 8}))

    assert found.backpressure_frac == pytest.approx(0.5)
    assert found.score_busy_frac == pytest.approx(0.8)
