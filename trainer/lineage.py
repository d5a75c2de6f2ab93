"""Which prompts are done and which remain, across any number of resumes. Pure.

A run walks through its prompts again and again. A prompt group's *position* counts along that walk: row `p % prompts`
of epoch `p // prompts`. TRL numbers the groups of each start of a run from 0; `PromptOrder` says which position that
is. After a resume the positions that were left out come first: none is trained twice, and none is lost.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

FILE = "lineage.json"


class Lineage(BaseModel):
    """What became of each position so far: trained, or dropped with a reason; `trained` as ranges `[first, after]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trained: list[tuple[int, int]] = Field(default_factory=list)
    dropped: dict[int, str] = Field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path) -> "Lineage":
        """Of a checkpoint's folder; `OSError` or `ValueError` if there is none: such a one can't be resumed exactly."""
        return cls.model_validate_json((checkpoint / FILE).read_text())

    def write(self, checkpoint: Path) -> None:
        (checkpoint / FILE).write_text(self.model_dump_json())

    def trained_positions(self) -> set[int]:
        return {position for first, after in self.trained for position in range(first, after)}

    def settled(self) -> set[int]:
        """Positions that are done, one way or the other."""
        return self.trained_positions() | set(self.dropped)

    def extended(self, trained: Iterable[int], dropped: dict[int, str]) -> "Lineage":
        """With what this start of the run did. Raises `ValueError` if it trained a position a second time."""
        before, new = self.trained_positions(), set(trained)
        if twice := before & new:
            raise ValueError(f"positions {sorted(twice)[:5]} were trained twice in one lineage")
        all_dropped = {p: why for p, why in (self.dropped | dropped).items() if p not in before and p not in new}
        return Lineage(trained=_ranges(before | new), dropped=all_dropped)

    def summary(self) -> dict[str, Any]:
        """`{"trained": n, "dropped": {reason: n}}`."""
        return {
            "trained": sum(after - first for first, after in self.trained),
            "dropped": dict(Counter(self.dropped.values())),
        }


class PromptOrder:
    """The order in which one start of the run takes its prompts: what remains of the walk so far, then epoch by epoch.

    Args:
        prompts: rows of the dataset.
        done: the lineage that this start continues.
    """

    def __init__(self, prompts: int, done: Lineage) -> None:
        settled = done.settled()
        reached = max(settled, default=-1) + 1
        self._next_epoch = -(-reached // prompts) * prompts
        self._first_pass = [p for p in range(self._next_epoch) if p not in settled]
        if not self._first_pass:
            self._first_pass = list(range(self._next_epoch, self._next_epoch + prompts))
            self._next_epoch += prompts
        self._prompts = prompts

    def first_rows(self) -> list[int]:
        """Rows of the dataset to go through first; whole epochs follow."""
        return [position % self._prompts for position in self._first_pass]

    def position(self, group: int) -> int:
        """Where the group that TRL calls `group` in this start stands on the walk."""
        if group < len(self._first_pass):
            return self._first_pass[group]
        return self._next_epoch + group - len(self._first_pass)


def _ranges(positions: set[int]) -> list[tuple[int, int]]:
    ordered = sorted(positions)
    if not ordered:
        return []
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
    return [(ordered[i], ordered[j - 1] + 1) for i, j in pairwise(cuts)]
