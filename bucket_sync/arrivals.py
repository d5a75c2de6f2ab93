"""What has arrived in a bucket, for those who wait for it: filled by a `BucketWatcher`, read by a `Stager`."""

import threading

from bucket_grpo.bucket_sync.hub_store import HubStore
from bucket_grpo.bucket_sync.watcher import BucketWatcher, Change


class Arrivals:
    """Wakes whoever waits for a key when the bucket's feed names it. Says only when to look, never what is there."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waited_for: dict[str, int] = {}
        self._arrived: set[str] = set()

    def add(self, change: Change) -> None:
        with self._changed:
            if change.op != "delete" and change.path in self._waited_for:
                self._arrived.add(change.path)
                self._changed.notify_all()

    def missed_some(self) -> None:
        """The feed has a gap: everybody who waits looks again."""
        with self._changed:
            self._arrived |= self._waited_for.keys()
            self._changed.notify_all()

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until `key` is named, at most `timeout_s` seconds; whether it was."""
        with self._changed:
            self._waited_for[key] = self._waited_for.get(key, 0) + 1
            try:
                return self._changed.wait_for(lambda: key in self._arrived, timeout_s)
            finally:
                self._waited_for[key] -= 1
                if not self._waited_for[key]:
                    del self._waited_for[key]
                    self._arrived.discard(key)


def watch(store: HubStore) -> tuple[Arrivals, BucketWatcher]:
    """Follow the bucket behind `store`; close the watcher when done."""
    arrivals = Arrivals()
    return arrivals, BucketWatcher(store, arrivals.add, arrivals.missed_some)
