"""When a version may be accepted, which one is published next, and which one is live: a pure state machine.

The trainer's version moves when a version is accepted, the rollouts' when it is live. Samples that are older than
`max_staleness` are dropped, so a trainer that runs ahead of its fleet makes samples for the bin. Rules:

- the lag (newest accepted − live) never exceeds `max_lag`; a publish that would exceed it waits;
- one version is published at a time; of those that wait meanwhile only the newest is kept, the others are skipped;
- live only grows.
"""

from dataclasses import dataclass


@dataclass
class BackPressure:
    """Args:
    max_staleness: versions by which a sample may be older than the trainer, as in TRL's config.
    """

    max_staleness: int
    accepted: int = 0
    live: int = 0
    waiting: int | None = None
    publishing: int | None = None
    skipped: int = 0
    lag_max: int = 0
    _before_first: int = 0

    @property
    def max_lag(self) -> int:
        """One less than `max_staleness`, as rollouts take time too; at least 1, or nothing could ever be accepted."""
        return max(1, self.max_staleness - 1)

    @property
    def lag(self) -> int:
        return self.accepted - self._abreast

    @property
    def _abreast(self) -> int:
        """What counts as live: a resumed run starts at any number, so before its first version it lags by nothing."""
        return max(self.live, self._before_first)

    def may_accept(self, number: int) -> bool:
        """False while `number` must wait. Raises `ValueError` for a number that is not newer than the last."""
        if number <= self.accepted:
            raise ValueError(f"version {number} is not newer than {self.accepted}, which was accepted before")
        # Where numbers jump by more than the bound, the fleet only has to be abreast.
        return self.lag == 0 or number - self._abreast <= self.max_lag

    def accept(self, number: int) -> int | None:
        """Take `number`; returns the version that it overtook, if any. Only when `may_accept`."""
        if not self.may_accept(number):
            raise ValueError(f"version {number} must wait: live is {self.live}, the lag may be {self.max_lag} at most")
        if not self.accepted:
            self._before_first = number - 1
        overtaken, self.waiting = self.waiting, number
        self.skipped += overtaken is not None
        self.accepted = number
        self.lag_max = max(self.lag_max, self.lag)
        return overtaken

    def start(self) -> int | None:
        """The version to publish now, or None if none waits or one is under way."""
        if self.publishing is None and self.waiting is not None:
            self.publishing, self.waiting = self.waiting, None
            return self.publishing
        return None

    def went_live(self, number: int) -> None:
        if number != self.publishing:
            raise ValueError(f"version {number} went live, but {self.publishing} is being published")
        self.live, self.publishing = number, None
