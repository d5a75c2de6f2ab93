"""Sampled completions with what became of them: text, reward, and the version that answered.

The proxy's journal holds token ids and the version, the trainer's `rollouts.jsonl` (where it is written) the reward.
They are joined by `rollout_key`, so the same prompt and answer have the same reward, whoever gave it.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from bucket_grpo.report.files import read_jsonl
from bucket_grpo.report.journal import Sample, read_samples
from bucket_grpo.report.metrics import Row, number, read_metrics

ROLLOUTS = "rollouts.jsonl"
Sort = Literal["time", "reward", "length"]


class Completion(BaseModel):
    """One sampled completion. `prompt` and `output` are texts where a tokenizer was given, else token ids in words."""

    id: str
    step: int | None
    """The optimizer step that was under way when it was answered."""
    version: int | None
    replica: str | None
    reward: float | None
    """None where the trainer kept no reward for it."""
    tokens: int
    mean_logprob: float
    """nats per token, under the policy that answered"""
    finish_reason: str | None
    prompt: str
    output: str


def rollout_key(prompt: Sequence[int], output: Sequence[int]) -> str:
    """The name under which trainer and report know one prompt with one answer."""
    parts = [np.asarray(ids, dtype="<i8").tobytes() for ids in (prompt, output)]
    return hashlib.sha256(len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]).hexdigest()[:32]


def completions(run_dir: Path, decode: Callable[[Sequence[int]], str] | None = None) -> list[Completion]:
    """Every sampled completion of a run, in the order of their answers.

    Args:
        decode: token ids → text; without one the ids are shown.
    """
    samples, _ = read_samples(run_dir / "journal")
    rewards = _rewards(run_dir / ROLLOUTS)
    steps = _StepClock(read_metrics(run_dir / "metrics.jsonl"))
    text = decode or (lambda ids: " ".join(map(str, ids)))
    return [_completion(sample, rewards, steps, text) for sample in sorted(samples, key=lambda s: s.t or 0.0)]


def select(
    found: Iterable[Completion], *, step: int | None = None, version: int | None = None, sort: Sort = "time", limit: int
) -> list[Completion]:
    """Those of one step or version; with `reward` or `length` the largest first, unknown ones last."""
    chosen = [c for c in found if step in (None, c.step) and version in (None, c.version)]
    if sort == "reward":
        chosen.sort(key=lambda c: -float("inf") if c.reward is None else c.reward, reverse=True)
    elif sort == "length":
        chosen.sort(key=lambda c: c.tokens, reverse=True)
    return chosen[:limit]


class _StepClock:
    """Which step was under way at a time: the first one that was logged later."""

    def __init__(self, rows: Sequence[Row]) -> None:
        timed = [row for row in rows if number(row, "time") is not None]
        self._times, self._steps = [row["time"] for row in timed], [row["step"] for row in timed]

    def at(self, t: float | None) -> int | None:
        i = len(self._times) if t is None else bisect_left(self._times, t)
        return self._steps[i] if i < len(self._steps) else None


def _rewards(path: Path) -> dict[str, float]:
    rows = [row for row in read_jsonl(path) if row is not None]
    return {row["key"]: reward for row in rows if (reward := number(row, "reward")) is not None}


def _completion(
    sample: Sample, rewards: dict[str, float], steps: _StepClock, text: Callable[[Sequence[int]], str]
) -> Completion:
    return Completion(
        id=sample.id,
        step=steps.at(sample.t),
        version=sample.number,
        replica=sample.replica,
        reward=rewards.get(rollout_key(sample.prompt, sample.output)),
        tokens=len(sample.output),
        mean_logprob=sum(sample.logprobs) / max(1, len(sample.logprobs)),
        finish_reason=sample.finish_reason,
        prompt=text(sample.prompt),
        output=text(sample.output),
    )
