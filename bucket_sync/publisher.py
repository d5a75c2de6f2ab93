"""Publishing behind the training loop's back: the trainer hands over a saved adapter and goes on.

`submit` packs and checks in the caller's thread, since a refusal is the trainer's fault and TRL deletes the folder
soon; one publisher thread does the rest: fence, write, confirm, announce, wait until live. What goes wrong there is
raised at the next `submit` or `wait_live`: a run must not go on with a fleet that it no longer reaches.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bucket_grpo.bucket_sync.backpressure import BackPressure
from bucket_grpo.bucket_sync.current import Superseded, check_fence
from bucket_grpo.bucket_sync.handover import hand_over
from bucket_grpo.bucket_sync.proxy_client import ProxyClient, ProxyError
from bucket_grpo.bucket_sync.store_contract import Store, StoreError
from bucket_grpo.bucket_sync.version_file import Canary, pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef

__all__ = ["PublishFailed", "PublishLimits", "Publisher", "Superseded"]

log = logging.getLogger(__name__)


class PublishFailed(Exception):
    """A version could not be brought to the fleet; the message says where it stopped and why."""


@dataclass(frozen=True)
class PublishLimits:
    """Bounds on waiting, in seconds. `confirm_s` is for one attempt and grows by a second per 10 MB."""

    store_attempts: int = 3
    confirm_s: float = 45.0
    live_s: float = 600.0
    proxy_outage_s: float = 60.0

    @property
    def publish_s(self) -> float:
        """A publish that takes longer than this hangs."""
        return self.store_attempts * 2 * self.confirm_s + 2 * self.proxy_outage_s + self.live_s


@dataclass
class _Accepted:
    ref: VersionRef
    data: bytes
    at: float


@dataclass
class _Times:
    publish_to_live_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    confirm_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)


class Publisher:
    """Args:
    base_model: the name under which replicas serve the base.
    max_staleness: as in TRL's config; see `backpressure`.
    token: for the proxy, if it asks for one.
    on_live: called from the publisher thread with each number that went live, ascending.
    lora_name: TRL's prefix of version names, as the proxy knows it.
    """

    def __init__(
        self,
        store: Store,
        proxy_url: str,
        *,
        run: str,
        incarnation: str,
        base_model: str,
        max_staleness: int,
        token: str | None = None,
        on_live: Callable[[int], None] | None = None,
        lora_name: str = "trl-policy",
        limits: PublishLimits | None = None,
    ) -> None:
        self.limits = limits or PublishLimits()
        self._store = store
        self._run, self._incarnation, self._base_model = run, incarnation, base_model
        self._on_live = on_live
        self._proxy = ProxyClient(proxy_url, token=token, outage_s=self.limits.proxy_outage_s, lora_name=lora_name)
        self._pressure = BackPressure(max_staleness)
        self._accepted: dict[int, _Accepted] = {}
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closing = False
        self._times = _Times()
        self._store_retries = 0
        self._retirements: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._retire_failures = 0
        self._threads = [
            threading.Thread(target=self._publish_loop, name="publisher", daemon=True),
            threading.Thread(target=self._retire_loop, name="retirer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def live(self) -> int:
        """The newest live version; 0 before the first."""
        with self._changed:
            return self._pressure.live

    def submit(self, number: int, step: int, adapter_dir: Path, canary: Canary | None = None) -> None:
        """Accept a version; returns at once unless the fleet is too far behind.

        Raises:
            VersionRejected: the adapter must not be served.
            PublishFailed: an earlier version failed (the cause is chained), or the fleet makes no progress.
            Superseded: a newer incarnation of this run took over.
        """
        self._raise_failure()
        data, ref = pack_version(
            adapter_dir,
            run=self._run,
            incarnation=self._incarnation,
            number=number,
            step=step,
            base_model=self._base_model,
            canary=canary,
        )
        started = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._failure or self._closing or self._pressure.may_accept(number), self.limits.publish_s
            ):
                raise PublishFailed(f"no version went live for {self.limits.publish_s:.0f} s: {self._where()}")
            self._raise_failure()
            if self._closing:
                raise PublishFailed(f"version {number} came after the publisher was closed")
            self._times.stall_s.append(time.monotonic() - started)
            overtaken = self._pressure.accept(number)
            if overtaken is not None:
                del self._accepted[overtaken]
                log.info("version %d is skipped: %d overtook it", overtaken, number)
            self._accepted[number] = _Accepted(ref, data, time.monotonic())
            self._changed.notify_all()
        if self._pressure.max_staleness == 0:  # rollouts may only ever come from the newest version
            self.wait_live(number, self.limits.publish_s)

    def check(self) -> None:
        """Raise what stopped the publisher, as `submit` would: the last version has no later call to raise it in."""
        self._raise_failure()

    def wait_live(self, number: int, timeout: float) -> None:
        """Wait until `number` or a newer version is live; raises as `submit`, and `PublishFailed` after `timeout` s."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure or self._is_live(number), timeout):
                raise PublishFailed(f"version {number} is not live after {timeout:.0f} s: {self._where()}")
            if not self._is_live(number):
                self._raise_failure()

    def retire(self, number: int) -> None:
        """Tell the proxy, in the background, that TRL needs the version no more."""
        self._retirements.put(number)

    def close(self, timeout: float) -> None:
        """Publish what was accepted, then end; gives up after `timeout` seconds. Raises nothing: see `stats`."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._retirements.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("closed the publisher while a version was still under way: %s", self._where())
        else:
            self._proxy.close()

    def stats(self) -> dict[str, object]:
        """Counts, and lists of seconds: one entry per version accepted (`stall_s`) or gone live (the others)."""
        with self._changed:
            return {
                "publishes": len(self._times.publish_to_live_s),
                "skipped": self._pressure.skipped,
                "accepted": self._pressure.accepted,
                "live": self._pressure.live,
                "lag_max": self._pressure.lag_max,
                "publish_to_live_s": list(self._times.publish_to_live_s),
                "write_s": list(self._times.write_s),
                "confirm_s": list(self._times.confirm_s),
                "stall_s": list(self._times.stall_s),
                "store_retries": self._store_retries,
                "proxy_retries": self._proxy.retries,
                "retire_failures": self._retire_failures,
                "failure": None if self._failure is None else str(self._failure),
            }

    def _publish_loop(self) -> None:
        while self._publish_next():
            pass

    def _publish_next(self) -> bool:
        """Wait for a version and bring it to the fleet; False once there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._pressure.waiting is not None or self._closing)
            number = self._pressure.start()
            if number is None:
                return False
            version = self._accepted.pop(number)
        try:
            self._publish(version)
            live_at = time.monotonic()
            if self._on_live is not None:
                self._on_live(number)
        except Exception as error:  # noqa: BLE001 - kept, and raised in the trainer's thread at its next call
            log.error("publishing version %d failed: %s", number, error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return False
        with self._changed:
            self._pressure.went_live(number)
            self._times.publish_to_live_s.append(live_at - version.at)
            self._changed.notify_all()
        return True

    def _publish(self, version: _Accepted) -> None:
        ref = version.ref
        try:
            check_fence(self._store, self._run, self._incarnation)
            self._store_version(version)
            self._proxy.announce(ref)
            liveness = self._proxy.wait_live(ref, self.limits.live_s)
        except (StoreError, ProxyError) as error:
            raise PublishFailed(f"version {ref.number} (step {ref.step}) did not reach the fleet: {error}") from error
        if liveness.state == "failed":
            causes = "; ".join(f"{replica}: {reason}" for replica, reason in sorted(liveness.failed_on.items()))
            causes = causes or liveness.reason or "no reason given"
            raise PublishFailed(f"version {ref.number} (step {ref.step}) failed on every replica: {causes}")

    def _store_version(self, version: _Accepted) -> None:
        done = hand_over(
            self._store,
            {version.ref.key: lambda: version.data},
            attempts=self.limits.store_attempts,
            confirm_s=self.limits.confirm_s,
        )
        with self._changed:
            self._store_retries += done.retries
            self._times.write_s.append(done.write_s)
            self._times.confirm_s.append(done.confirm_s)

    def _retire_loop(self) -> None:
        while (number := self._retirements.get()) is not None:
            try:
                self._proxy.retire(number)
            except ProxyError as error:
                # Costs a slot until the proxy forgets the run, nothing else; a proxy that is gone shows in `submit`.
                self._retire_failures += 1
                log.warning("version %d was not retired: %s", number, error)

    def _is_live(self, number: int) -> bool:
        return self._pressure.live >= number

    def _raise_failure(self) -> None:
        failure = self._failure
        if isinstance(failure, PublishFailed | Superseded):
            raise type(failure)(str(failure)) from failure
        if failure is not None:
            raise PublishFailed(f"the publisher stopped: {type(failure).__name__}: {failure}") from failure

    def _where(self) -> str:
        pressure = self._pressure
        return f"accepted {pressure.accepted}, publishing {pressure.publishing}, live {pressure.live}"
