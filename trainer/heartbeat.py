"""The run's sign of life in the bucket, and the fence: replicas end by the one, a superseded trainer by the other."""

import logging
import threading

from bucket_grpo.bucket_sync.current import Current, RunState, Superseded, claim, heartbeat, read_current
from bucket_grpo.bucket_sync.deadline import with_deadline
from bucket_grpo.bucket_sync.store_contract import Store, StoreError

# Rare enough that a mount's debounce seldom holds a version back because of it.
INTERVAL_S = 20.0
# A mount whose other side hangs must not keep a finished job alive.
WRITE_LIMIT_S = 20.0

log = logging.getLogger(__name__)


class Heartbeat:
    """Refreshes `current.json` from a thread of its own until `stop` says how the run ended.

    `superseded` holds the reason once a newer incarnation owns the run; the training loop looks at it at each step.
    """

    def __init__(self, store: Store, run: str, incarnation: str, interval_s: float = INTERVAL_S) -> None:
        current = read_current(store, run)
        if current is None or current.incarnation != incarnation:
            # Nobody claimed the run yet, or the last beat of an older incarnation came after our launcher's claim.
            current = claim(store, run, incarnation)  # raises Superseded if a newer one owns it
        self._store = store
        self._current: Current = current
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self.superseded: str | None = None
        self.missed = 0
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, state: RunState) -> None:
        """The last beat: how the run ended. A bucket that takes no more writes is logged; the run is over anyway."""
        self._stopped.set()
        self._thread.join(30)
        if self.superseded is None:
            self._write(state)

    def _beat(self) -> None:
        while not self._stopped.wait(self._interval_s) and self.superseded is None:
            self._write("running")

    def _write(self, state: RunState) -> None:
        try:
            self._current = with_deadline(lambda: heartbeat(self._store, self._current, state), WRITE_LIMIT_S)
        except Superseded as error:
            self.superseded = str(error)
        except (StoreError, TimeoutError) as error:
            self.missed += 1
            log.warning("heartbeat not written (%d so far): %s", self.missed, error)
