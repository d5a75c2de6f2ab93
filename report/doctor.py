"""Which side of a run is slow, or why it does not learn, with the evidence and the run-file keys to change.

Pure rules over `Signals`, one function each. The reading they share: a full queue, no waiting and held-back samples
mean that the trainer is the slow side; an empty queue and a growing wait, that generation is. A rule whose signals were
not recorded says nothing; no rule guesses.
"""

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel

from bucket_grpo.report.signals import Signals

Verdict = Literal[
    "not-learning", "publish-bound", "reward-bound", "client-capped", "generation-bound", "trainer-bound", "stale",
    "balanced", "unknown",
]  # fmt: skip

PUBLISH_SHARE = 0.15  # of the wall clock: what a publish's stall may take before it is the first thing to mend
WAIT_SHARE = 0.10  # of a step, spent waiting for samples
FULL, EMPTY = 0.7, 0.2  # of the queue
AT_THE_CAP = 0.95  # of max_inflight_tasks
SCORE_BUSY = 0.8
STALE = 0.02  # of the samples
MIN_STEPS_TO_JUDGE = 40
FLAT = 0.02  # a gain in reward that is no gain
# Without recomputed activations a step costs 3 forwards instead of 4 (a backward costs two).
WITHOUT_CHECKPOINTING = 3 / 4


class Change(BaseModel):
    """One edit of the run file and what it should do."""

    key: str
    value: str
    why: str
    predicted_step_s: float | None = None
    """Wall clock of a step after it, publishes included; None where no sound estimate exists."""


class Finding(BaseModel):
    verdict: Verdict
    evidence: list[str]
    changes: list[Change]


class Diagnosis(BaseModel):
    """The first finding is the verdict: mend it first, then look again."""

    verdict: Verdict
    findings: list[Finding]


def diagnose(signals: Signals) -> Diagnosis:
    found = [finding for rule in RULES if (finding := rule(signals)) is not None]
    if not any(finding.verdict in SPEED for finding in found):
        found.append(_no_bottleneck(signals))
    return Diagnosis(verdict=found[0].verdict, findings=found)


def advice_lines(finding: Finding) -> list[str]:
    """A finding in sentences: the evidence first, then what to change."""
    lines = [f"because {evidence}" for evidence in finding.evidence]
    for change in finding.changes:
        predicted = "" if change.predicted_step_s is None else f" → about {change.predicted_step_s:.2f} s a step"
        lines.append(f"change {change.key} to {change.value}{predicted} ({change.why})")
    return lines


def not_learning(s: Signals) -> Finding | None:
    first, last = s.reward_first20, s.reward_last20
    if first is None or last is None or (s.steps or 0) < MIN_STEPS_TO_JUDGE or last - first > FLAT:
        return None
    evidence = [f"reward {first:.3f} in the first 20 steps, {last:.3f} in the last 20 of {s.steps}"]
    changes = []
    if s.reward_max == 0:
        evidence.append("no step had a reward above 0: nothing can be learned, whatever else is set")
        changes.append(_change("reward_funcs", "check them", "read a few `completions`: is a right answer scored 0?"))
    if s.clipped_frac is not None and s.clipped_frac >= 0.3:
        evidence.append(f"{s.clipped_frac:.0%} of the completions are cut off by the length limit")
        longer = str(2 * s.max_completion_length) if s.max_completion_length else "twice as long"
        changes.append(_change("max_completion_length", longer, "an answer that is cut off is scored as wrong"))
    if s.zero_std_frac is not None and s.zero_std_frac >= 0.6:
        evidence.append(f"in {s.zero_std_frac:.0%} of the groups all rollouts got the same reward: they teach nothing")
        more = str(2 * s.num_generations) if s.num_generations else "twice as many"
        changes.append(_change("num_generations", more, "or problems that the base solves 20 to 80 % of the time"))
    if not changes:
        rate = f"{3 * s.learning_rate:.1e}" if s.learning_rate and last >= first - FLAT else None
        if rate:
            changes.append(_change("learning_rate", rate, "rewards differ within groups, but the policy does not move"))
        else:
            changes.append(_change("learning_rate", "a third", "the reward falls: the policy moves too far"))
    return Finding(verdict="not-learning", evidence=evidence, changes=changes)


def publish_bound(s: Signals) -> Finding | None:
    if s.publish_s is None or s.cycle_s is None or s.step_s is None or s.stall_s is None or not s.weight_sync_steps:
        return None
    share = s.publish_s / s.cycle_s
    if share < PUBLISH_SHARE:
        return None
    rarer = 2 * s.weight_sync_steps
    return Finding(
        verdict="publish-bound",
        evidence=[
            f"a publish stops training for {s.stall_s:.2f} s every {s.weight_sync_steps} steps: {share:.0%} of the time"
        ],
        changes=[
            _change("--sync", "deferred", "training goes on while a version travels to the replicas", s.step_s),
            _change(
                "weight_sync_steps",
                str(rarer),
                "half as many publishes; samples get older",
                s.step_s + s.stall_s / rarer,
            ),
        ],
    )


def reward_bound(s: Signals) -> Finding | None:
    if not _starved(s) or s.score_busy_frac is None or s.score_busy_frac < SCORE_BUSY:
        return None
    return Finding(
        verdict="reward-bound",
        evidence=[
            _waiting(s),
            f"the reward functions are busy {s.score_busy_frac:.0%} of the time, one group at a time",
        ],
        changes=[
            _change("reward_funcs", "async or faster", "more replicas would only wait for the scores", _without_wait(s))
        ],
    )


def client_capped(s: Signals) -> Finding | None:
    if not _starved(s) or not _capped(s) or (reward_bound(s) is not None):
        return None
    assert s.max_inflight_tasks is not None
    return Finding(
        verdict="client-capped",
        evidence=[
            _waiting(s),
            f"{s.inflight:.0f} rollouts in flight, the cap is {s.max_inflight_tasks}: the replicas get no more to do",
        ],
        changes=[
            _change(
                "max_inflight_tasks", str(3 * s.max_inflight_tasks),
                "costs nothing; if the wait stays, the replicas are at their limit: then add one", _without_wait(s),
            )
        ],
    )  # fmt: skip


def generation_bound(s: Signals) -> Finding | None:
    if not _starved(s) or client_capped(s) is not None or reward_bound(s) is not None:
        return None
    changes = []
    if s.replicas:
        changes.append(
            _change(
                "jobs.vllm.replicas", str(s.replicas + 1), "the replicas have all the work that they can hold",
                _with_replicas(s, s.replicas + 1),
            )
        )  # fmt: skip
    else:
        changes.append(_change("jobs.vllm.replicas", "one more", "the replicas have all the work that they can hold"))
    return Finding(verdict="generation-bound", evidence=[_waiting(s), *_queue(s)], changes=changes)


def trainer_bound(s: Signals) -> Finding | None:
    if s.fwd_bwd_s is None or s.step_s is None or s.cycle_s is None or _starved(s):
        return None
    held_back = (s.queue_fill is not None and s.queue_fill >= FULL) or (s.backpressure_frac or 0) >= 0.5
    if not held_back:
        return None
    evidence = [f"forward and backward take {s.fwd_bwd_s:.2f} of a step's {s.step_s:.2f} s", *_queue(s)]
    changes = []
    if s.samples_per_row is not None and s.samples_per_row < 2:
        evidence.append(f"{s.samples_per_row:.1f} samples in a forward: the device waits for its next small job")
        budget = str(4 * s.max_model_len) if s.max_model_len else "4 × the context length"
        changes.append(_change("token_budget", budget, "packs many samples into one forward"))
    if s.gradient_checkpointing:
        saved = s.fwd_bwd_s * (1 - WITHOUT_CHECKPOINTING)
        changes.append(
            _change("gradient_checkpointing", "false", "no forward is computed twice; needs memory", s.cycle_s - saved)
        )
    if not changes:
        if s.mfu is not None:
            evidence.append(f"forward and backward reach {s.mfu:.0%} of the device's peak")
        changes.append(_change("jobs.trainer.flavor", "more or faster devices", "the settings leave nothing to win"))
        if s.replicas and s.replicas > 1:
            changes.append(_change("jobs.vllm.replicas", str(s.replicas - 1), "cheaper: the queue is full anyway"))
    return Finding(verdict="trainer-bound", evidence=evidence, changes=changes)


def stale(s: Signals) -> Finding | None:
    if s.dropped_stale_frac is None or s.dropped_stale_frac <= STALE:
        return None
    changes = []
    if s.queue_maxsize and s.queue_fill is not None and s.queue_fill > 0.5:
        changes.append(_change("queue_maxsize", str(s.queue_maxsize // 2), "samples grow old in the queue"))
    if s.weight_sync_steps:
        changes.append(_change("weight_sync_steps", str(2 * s.weight_sync_steps), "a version lasts longer"))
    return Finding(
        verdict="stale",
        evidence=[f"{s.dropped_stale_frac:.1%} of the samples were generated, then dropped as too old"],
        changes=changes,
    )


# In the order in which they are to be mended: no use in a fast run that learns nothing; a stall hides what is below it.
RULES: tuple[Callable[[Signals], Finding | None], ...] = (
    not_learning, publish_bound, reward_bound, client_capped, generation_bound, trainer_bound, stale,
)  # fmt: skip
SPEED = {"publish-bound", "reward-bound", "client-capped", "generation-bound", "trainer-bound"}


def _no_bottleneck(s: Signals) -> Finding:
    if s.step_s is None or s.rollout_wait_s is None:
        return Finding(verdict="unknown", evidence=["metrics.jsonl has no step and waiting times"], changes=[])
    return Finding(verdict="balanced", evidence=[_waiting(s), *_queue(s)], changes=[])


def _starved(s: Signals) -> bool:
    """The trainer waits for samples, and nothing holds samples back."""
    if s.rollout_wait_s is None or s.step_s is None:
        return False
    return s.rollout_wait_s / s.step_s >= WAIT_SHARE and (s.queue_fill is None or s.queue_fill < FULL)


def _capped(s: Signals) -> bool:
    return bool(s.inflight and s.max_inflight_tasks and s.inflight >= AT_THE_CAP * s.max_inflight_tasks)


def _without_wait(s: Signals) -> float | None:
    return None if s.cycle_s is None or s.rollout_wait_s is None else s.cycle_s - s.rollout_wait_s


def _with_replicas(s: Signals, replicas: int) -> float | None:
    """Generation paces the step now and is spread over more replicas; the trainer's own time is the floor."""
    floor = _without_wait(s)
    return (
        None if floor is None or s.cycle_s is None or not s.replicas else max(floor, s.cycle_s * s.replicas / replicas)
    )


def _waiting(s: Signals) -> str:
    assert s.rollout_wait_s is not None
    assert s.step_s is not None
    return f"training waits for samples {s.rollout_wait_s:.2f} of a step's {s.step_s:.2f} s"


def _queue(s: Signals) -> list[str]:
    lines = []
    if s.queue_fill is not None:
        state = "full" if s.queue_fill >= FULL else "empty" if s.queue_fill <= EMPTY else "neither full nor empty"
        lines.append(f"the queue is {state}: {s.queue_mean:.0f} of {s.queue_maxsize} samples")
    if s.backpressure_frac:
        lines.append(f"finished samples had to wait for room in it during {s.backpressure_frac:.0%} of the steps")
    return lines


def _change(key: str, value: str, why: str, predicted_step_s: float | None = None) -> Change:
    return Change(key=key, value=value, why=why, predicted_step_s=predicted_step_s)
