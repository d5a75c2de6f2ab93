"""The proxy's journal, read back: one line for each completion, with token logprobs for a sample of them."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucket_grpo.report.files import read_jsonl


@dataclass(frozen=True)
class Sample:
    """One completion with everything needed to compute it again.

    Args:
        served: name of the version that answered, as vLLM served it; `number` is the version's.
        t: when it was answered, Unix seconds.
        prompt: P token ids.
        output: T token ids.
        logprobs: T natural log-probabilities, as the replica reported them.
    """

    id: str
    served: str
    replica: str | None
    number: int | None
    t: float | None
    finish_reason: str | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]


def journal_lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Every line of every journal file (one a proxy process), oldest file first; None for one that can't be parsed.

    Raises `FileNotFoundError` if the folder holds no journal.
    """
    files = sorted(folder.glob("journal-*.jsonl"), key=lambda path: (path.stat().st_mtime, path.name))
    if not files:
        raise FileNotFoundError(f"{folder} holds no journal-*.jsonl: has this run answered any completion?")
    for path in files:
        yield from read_jsonl(path)


def read_samples(folder: Path) -> tuple[list[Sample], int]:
    """`(samples, unreadable lines)`, one for each line that has token logprobs.

    What was asked of the base model by its own name is left out: no version answered it.
    """
    samples, unreadable = [], 0
    for line in journal_lines(folder):
        if line is None:
            unreadable += 1
            continue
        sample = line.get("sample")
        if not sample or sample.get("logprobs") is None:
            continue
        if line.get("number") is None and line["requested"] == line["served"]:
            continue
        samples.append(
            Sample(
                id=line["id"],
                served=line["served"],
                replica=line.get("replica"),
                number=line.get("number"),
                t=line.get("t"),
                finish_reason=line.get("finish_reason"),
                prompt=tuple(sample["prompt"]),
                output=tuple(sample["output"]),
                logprobs=tuple(sample["logprobs"]),
            )
        )
    return samples, unreadable


@dataclass
class JournalTotals:
    """Counts over all completions of a run, over every start of the proxy."""

    requests: int = 0
    completion_tokens: int = 0
    late: int = 0
    retried: int = 0
    failed: int = 0
    routes: Counter[str] = field(default_factory=Counter)
    answers: list[tuple[float, str, int]] = field(default_factory=list)
    """(Unix seconds, replica, version number) of each answer by a version"""
    first_t: float = math.inf
    last_t: float = -math.inf

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens over the seconds between the first answer and the last."""
        return self.completion_tokens / (self.last_t - self.first_t) if self.last_t > self.first_t else None

    def routing(self) -> dict[str, int]:
        """Under the names of `Routing`; the journal does not tell which requests were parked."""
        routes = {name: self.routes[name] for name in ("affinity", "cold", "spilled")}
        return {"requests": self.requests, **routes, "late": self.late, "retried": self.retried, "failed": self.failed}


def journal_totals(folder: Path) -> JournalTotals | None:
    """Sums over the journal in `folder`; None if there is none."""
    totals = JournalTotals()
    try:
        for line in journal_lines(folder):
            if line is not None:
                _count(totals, line)
    except FileNotFoundError:
        return None
    return totals


def _count(totals: JournalTotals, line: dict[str, Any]) -> None:
    totals.requests += 1
    totals.completion_tokens += line.get("completion_tokens") or 0
    totals.routes[str(line.get("route"))] += 1
    totals.late += bool(line.get("late"))
    totals.retried += bool(line.get("retries"))
    totals.failed += line.get("status", 200) >= 500
    if (t := line.get("t")) is not None:
        totals.first_t, totals.last_t = min(totals.first_t, t), max(totals.last_t, t)
        if line.get("number") is not None and line.get("replica"):
            totals.answers.append((t, line["replica"], line["number"]))
