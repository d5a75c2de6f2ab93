"""When a mount's one flush loop sends a batch: pure, the clock is an argument.

Every closed (or fsynced, or deleted) file is a signal. The first one opens a batch; the batch goes out when no signal
came for `debounce_s`, or `window_s` after it was opened. There is one loop: while a batch is uploading nothing else is
sent, and what was closed meanwhile starts its own debounce only when the upload has ended.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass
class FlushSchedule(Generic[T]):
    debounce_s: float
    window_s: float
    _pending: list[T | None] = field(default_factory=list)
    _opened_at: float = 0.0
    _last_signal_at: float = 0.0
    _uploading: bool = False

    def signal(self, now: float, item: T | None = None) -> None:
        """`item` wants to be flushed; None only wakes the loop (for queued deletions)."""
        if not self._pending:
            self._opened_at = now
        self._pending.append(item)
        self._last_signal_at = now

    def due_at(self) -> float | None:
        """When the next batch goes out if nothing else happens; None while idle or uploading."""
        if self._uploading or not self._pending:
            return None
        return min(self._opened_at + self.window_s, self._last_signal_at + self.debounce_s)

    def take(self, now: float, *, force: bool = False) -> list[T] | None:
        """The batch that is due, each item once and at its last place; None if none is. `finished` must follow."""
        due = self.due_at()
        if due is None or (now < due and not force):
            return None
        batch = list(dict.fromkeys(item for item in reversed(self._pending) if item is not None))
        self._pending.clear()
        self._uploading = True
        return batch[::-1]

    def finished(self, now: float) -> None:
        """The upload ended; signals that waited for it are received now."""
        self._uploading = False
        if self._pending:
            self._opened_at = self._last_signal_at = now
