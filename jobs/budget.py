"""When is a run to be ended although it could go on? Pure."""

from dataclasses import dataclass

from bucket_grpo.jobs.settings import Budget, seconds


@dataclass
class BudgetWatch:
    """Compares what a run has spent, and when it last moved, with what its owner allows.

    Args:
        usd_per_hour: of all its jobs together.
        reserve_s: time that checkpointing and cancelling take; what it costs is held back from `max_usd`.
    """

    budget: Budget
    usd_per_hour: float
    reserve_s: float = 30.0
    last_step: int | None = None
    moved_at: float | None = None

    def why_stop(self, now: float, usd: float, step: int | None) -> str | None:
        """The reason to end the run now, or None.

        Args:
            now: any clock, in seconds.
            usd: spent so far.
            step: last finished training step; None before the first.
        """
        if step is not None and step != self.last_step:
            self.last_step, self.moved_at = step, now
        limit = self.budget.max_usd
        if limit is not None and usd + self.usd_per_hour * self.reserve_s / 3600 >= limit:
            return f"budget: ${usd:.4f} of ${limit:g} are spent (max_usd), the rest is for checkpointing and ending"
        if self.budget.no_progress is not None and self.moved_at is not None:
            idle_s = now - self.moved_at
            if idle_s >= seconds(self.budget.no_progress):
                return f"no progress: no training step for {idle_s:.0f} s after step {self.last_step}"
        return None
