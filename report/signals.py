"""What the doctor looks at: a run's figures reduced to one value each, with the settings that they depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bucket_grpo.report.figures import SAMPLES, RunFiles, compose, stall_seconds
from bucket_grpo.report.metrics import Row, column, mean, median, number
from bucket_grpo.trainer.trl_fields import known

WARM_UP_FRAC = 0.1  # of the rows, left out of timings: the queue fills, kernels compile


@dataclass(frozen=True, kw_only=True)
class Signals:
    """All seconds are per optimizer step unless said otherwise. None: not recorded; rules that need it stay silent."""

    steps: int | None = None
    # Where a step's time goes
    step_s: float | None = None
    """without what publishes add to it"""
    fwd_bwd_s: float | None = None
    rollout_wait_s: float | None = None
    stall_s: float | None = None
    """for one publish"""
    weight_sync_steps: int | None = None
    # Generation
    queue_mean: float | None = None
    queue_maxsize: int | None = None
    backpressure_frac: float | None = None
    """of the steps, those during which a finished sample had to wait for room in the queue"""
    inflight: float | None = None
    """rollouts in flight, mean"""
    max_inflight_tasks: int | None = None
    replicas: int | None = None
    score_busy_frac: float | None = None
    """of the time, that spent in the reward functions, which score one group after the other"""
    # How the trainer packs
    samples_per_step: float | None = None
    samples_per_row: float | None = None
    gradient_checkpointing: bool | None = None
    mfu: float | None = None
    """of forward and backward, 0 to 1"""
    max_model_len: int | None = None
    # Learning
    reward_first20: float | None = None
    reward_last20: float | None = None
    reward_max: float | None = None
    """largest mean reward of a step"""
    reward_std: float | None = None
    """mean standard deviation of the rewards of one group"""
    zero_std_frac: float | None = None
    clipped_frac: float | None = None
    dropped_stale_frac: float | None = None
    learning_rate: float | None = None
    max_completion_length: int | None = None
    num_generations: int | None = None
    max_staleness: int | None = None

    @property
    def publish_s(self) -> float | None:
        """The share of one step in a publish's stall."""
        return self.stall_s / self.weight_sync_steps if self.stall_s is not None and self.weight_sync_steps else None

    @property
    def cycle_s(self) -> float | None:
        """Wall-clock time of a step, publishes included."""
        return None if self.step_s is None else self.step_s + (self.publish_s or 0.0)

    @property
    def queue_fill(self) -> float | None:
        return self.queue_mean / self.queue_maxsize if self.queue_mean is not None and self.queue_maxsize else None


def signals(files: RunFiles) -> Signals:
    """The signals of a run, from what `gather` found."""
    report, settings = compose(files), _settings(files.run_file)
    every, stall_s = settings.get("weight_sync_steps"), mean(stall_seconds(files))
    warm = files.rows[int(len(files.rows) * WARM_UP_FRAC) :]
    whole_step_s, cap = mean(column(warm, "perf/step_s")), settings.get("max_inflight_tasks")
    return Signals(
        steps=report.steps,
        step_s=whole_step_s - stall_s / every if whole_step_s and stall_s and every else whole_step_s,
        fwd_bwd_s=median(column(warm, "perf/fwd_bwd_s")),
        rollout_wait_s=mean(column(warm, "perf/rollout_wait_s")),
        stall_s=stall_s,
        weight_sync_steps=every,
        queue_mean=mean(column(warm, "sample/rollout_queue_size")),
        queue_maxsize=settings.get("queue_maxsize"),
        backpressure_frac=_frac_of_rows(warm, "rollout/backpressure_s", watched="rollout/inflight"),
        inflight=mean(column(warm, "rollout/inflight")),
        max_inflight_tasks=cap if cap and cap > 0 else None,
        replicas=len(files.proxy["replicas"]) if files.proxy.get("replicas") else None,
        score_busy_frac=_score_busy_frac(warm, settings.get("num_generations")),
        samples_per_step=mean(column(warm, SAMPLES)),
        samples_per_row=mean(column(warm, "batch/samples_per_row")),
        gradient_checkpointing=settings.get("gradient_checkpointing"),
        mfu=mean(column(warm, "perf/mfu_fwd_bwd")),
        max_model_len=files.proxy.get("max_model_len"),
        reward_first20=report.reward_first20,
        reward_last20=report.reward_last20,
        reward_max=max(column(files.rows, "reward"), default=None),
        reward_std=mean(column(files.rows, "reward_std")),
        zero_std_frac=report.zero_std_frac,
        clipped_frac=report.clipped_frac,
        dropped_stale_frac=report.dropped_stale_frac,
        learning_rate=settings.get("learning_rate"),
        max_completion_length=settings.get("max_completion_length"),
        num_generations=settings.get("num_generations"),
        max_staleness=settings.get("max_staleness"),
    )


def _settings(run_file: dict[str, Any]) -> dict[str, Any]:
    """The run file with TRL's defaults where it is silent; nothing without a run file."""
    defaults = {name: field["default"] for name, field in known().items()}
    return defaults | run_file if run_file else {}


def _frac_of_rows(rows: Sequence[Row], name: str, *, watched: str) -> float | None:
    """TRL logs an event's metric only in steps that had one: the fraction of the steps in which `watched` was known."""
    watching = [row for row in rows if number(row, watched) is not None]
    return sum(number(row, name) is not None for row in watching) / len(watching) if watching else None


def _score_busy_frac(rows: Sequence[Row], num_generations: int | None) -> float | None:
    """Seconds of scoring per second: one group's scoring time by the groups of a step over the step's time."""
    score_s, step_s, samples = (mean(column(rows, name)) for name in ("rollout/score_s", "perf/step_s", SAMPLES))
    if score_s is None or not step_s or samples is None or not num_generations:
        return None
    return score_s * samples / num_generations / step_s
