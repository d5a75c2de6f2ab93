"""`metrics.jsonl`, one JSON object for each logged step, under TRL's own names; and the few statistics that we need."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bucket_grpo.report.files import read_jsonl

Row = dict[str, Any]
WINDOW = 20


def read_metrics(path: Path) -> list[Row]:
    """Rows in the order of their steps. A resumed run does some steps again: the last row of a step counts.

    TRL's closing summary of a run (`train_runtime` …) is a row without samples and is left out.
    """
    rows: dict[int, Row] = {}
    for row in read_jsonl(path):
        if row is not None and isinstance(row.get("step"), int) and "train_runtime" not in row:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def number(row: Row, name: str) -> float | None:
    """The metric's value; None where it is missing, null or not finite."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def column(rows: Iterable[Row], name: str) -> list[float]:
    """The known values of one metric."""
    return [value for row in rows if (value := number(row, name)) is not None]


def first_steps(rows: Sequence[Row], steps: int = WINDOW) -> list[Row]:
    """Rows of the run's first `steps` optimizer steps, whatever the logging interval."""
    return [row for row in rows if row["step"] <= steps]


def last_steps(rows: Sequence[Row], steps: int = WINDOW) -> list[Row]:
    return [row for row in rows if row["step"] > rows[-1]["step"] - steps]


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def total(values: Sequence[float]) -> float | None:
    return math.fsum(values) if values else None


def weighted_mean(rows: Iterable[Row], name: str, weight: str) -> float | None:
    """Mean over all samples of a per-step mean: a step with more samples weighs more. Rows lacking one are left out."""
    pairs = [(v, w) for row in rows if (v := number(row, name)) is not None and (w := number(row, weight)) is not None]
    weights = math.fsum(w for _, w in pairs)
    return math.fsum(v * w for v, w in pairs) / weights if weights else None


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of the last `window` values up to each one; as long as `values`."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
