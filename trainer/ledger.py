"""Which prompt groups were trained, which were dropped and why.

TRL marks a group as trained when its samples are collated, but the dataloader collates one micro-batch ahead: at a
checkpoint or a kill the last one was never trained. The ledger commits a group in `training_step` instead.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

STALE = "stale"


class Ledger(set[int]):
    """Stands in for TRL's set of trained groups: `update` (called at collation) only queues, `commit` makes it true.

    Micro-batches are trained in the order in which they were collated, one `commit` each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._collated: deque[set[int]] = deque()
        self._dropped: dict[int, str] = {}

    def update(self, *groups: Iterable[int]) -> None:
        self._collated.append({group for some in groups for group in some})

    def commit(self) -> None:
        """The oldest collated micro-batch has been through forward and backward."""
        for group in self._collated.popleft():
            self.add(group)
            self._dropped.pop(group, None)

    def drop(self, group: int, reason: str) -> None:
        """A sample of `group` was discarded. A group of which anything is trained counts as trained."""
        if group not in self:
            self._dropped[group] = reason

    @property
    def dropped(self) -> dict[int, str]:
        """Groups of which nothing was trained, and why."""
        return dict(self._dropped)


class ObservedQueue:
    """TRL's rollout queue as the trainer reads it; each sample is shown to `observe` before TRL decides about it."""

    def __init__(self, queue: Any, observe: Any) -> None:
        self._queue = queue
        self._observe = observe

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        self._observe(sample)
        return sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
