"""A replica ends itself when its run is over or dead, so that nobody pays for one that has no work."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from bucket_grpo.bucket_sync.current import Current, read_current
from bucket_grpo.bucket_sync.stores import Store, StoreError
from bucket_grpo.inference.threads import in_thread

LOOK_EVERY_S = 10.0
CLOCK_SKEW = timedelta(seconds=10)

log = logging.getLogger(__name__)


def why_ended(current: Current | None, dead_after_s: float, started_at: datetime, now: datetime) -> str | None:
    """Why a replica of this run has no more to do, or `None`.

    Args:
        current: the run's `current.json`; `None` if nobody claimed the run yet.
        dead_after_s: seconds without a heartbeat, or without a claim, after which the run counts as dead.
        started_at: when the replica started. What `current.json` says from before may be about an earlier start of the
            run, whose replacement has not claimed it yet.
    """
    if current is None or current.heartbeat_at < started_at - CLOCK_SKEW:
        waited_s = (now - started_at).total_seconds()
        return f"no trainer claimed the run within {dead_after_s:.0f} s" if waited_s > dead_after_s else None
    if current.state != "running":
        return f"run {current.run} is {current.state}"
    if current.age_s(now) > dead_after_s:
        return f"run {current.run} is dead: its last heartbeat was {current.age_s(now):.0f} s ago"
    return None


async def until_run_ends(store: Store, run: str, dead_after_s: float) -> str:
    """Return why, once the run is over. A store that cannot be read says nothing about the run."""
    started_at = datetime.now(UTC)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            current = await in_thread(lambda: read_current(store, run))
        except StoreError as error:
            log.warning("cannot see whether the run goes on: %s", error)
            continue
        reason = why_ended(current, dead_after_s, started_at, datetime.now(UTC))
        if reason is not None:
            return reason
