"""`<run>/current.json`: which incarnation of a run owns it. The launcher writes it, the trainer keeps it fresh.

Incarnations sort by time of start, so the newest name wins; whoever finds a newer one than its own stops writing.
"""

import time
from datetime import UTC, datetime
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from bucket_grpo.bucket_sync.store_contract import NotFound, Store, StoreError
from bucket_grpo.bucket_sync.vocabulary import CURRENT_FILE, check_run_name

RunState = Literal["running", "finished", "failed"]
READ_ATTEMPTS = 5
READ_PAUSE_S = 0.1


class Superseded(Exception):
    """A newer incarnation of the run took over: this one must not publish, checkpoint or delete any more."""


class Current(BaseModel):
    """The content of `current.json`; times are UTC."""

    model_config = ConfigDict(extra="ignore")

    run: str
    incarnation: str
    state: RunState = "running"
    started_at: AwareDatetime
    heartbeat_at: AwareDatetime

    def age_s(self, now: datetime | None = None) -> float:
        """Seconds since the last heartbeat; never negative, since clocks of machines differ."""
        return max(0.0, ((now or datetime.now(UTC)) - self.heartbeat_at).total_seconds())


def current_key(run: str) -> str:
    return f"{check_run_name(run)}/{CURRENT_FILE}"


def read_current(store: Store, run: str) -> Current | None:
    """Who owns the run, or None if nobody ever claimed it. A pointer may be seen half written: it is read again."""
    key = current_key(run)
    for attempt in range(READ_ATTEMPTS):
        if attempt:
            time.sleep(READ_PAUSE_S)
        try:
            return Current.model_validate_json(store.read(key, max_bytes=64 * 1024))
        except NotFound:
            return None
        except ValidationError as error:
            cause = error
    raise StoreError(f"{key} does not say who owns the run: {cause}")


def check_fence(store: Store, run: str, incarnation: str) -> None:
    """Raise `Superseded` if a newer incarnation owns the run."""
    current = read_current(store, run)
    if current is not None and current.incarnation > incarnation:
        raise Superseded(
            f"incarnation {current.incarnation} took over run {run} at {current.started_at:%Y-%m-%d %H:%M:%S} UTC; "
            f"{incarnation} stops publishing. If that was not meant, cancel the newer one and resume."
        )


def claim(store: Store, run: str, incarnation: str) -> Current:
    """Make `incarnation` the owner; raises `Superseded` if a newer one is."""
    check_fence(store, run, incarnation)
    now = datetime.now(UTC)
    return _write(store, Current(run=run, incarnation=incarnation, started_at=now, heartbeat_at=now))


def heartbeat(store: Store, current: Current, state: RunState = "running") -> Current:
    """Say that the run is alive, or how it ended; raises `Superseded` instead of overwriting a newer owner's claim."""
    check_fence(store, current.run, current.incarnation)
    return _write(store, current.model_copy(update={"heartbeat_at": datetime.now(UTC), "state": state}))


def _write(store: Store, current: Current) -> Current:
    store.write_pointer(current_key(current.run), current.model_dump_json().encode())
    return current
