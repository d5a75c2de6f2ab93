"""What the proxy believes about replicas and versions, and the rules on it: live, retired, failed, routable.

Pure: no I/O, the clock is given. Everything is rebuilt from the agents' whole states and from the versions that were
accepted, so a repeated or late message does no harm. `revision` moves whenever an answer of this module may change.
"""

import re
from collections.abc import Callable, Iterable

from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState, served_name
from bucket_grpo.bucket_sync.wire import AgentStatus, VersionLiveness
from bucket_grpo.proxy.fleet_state import Event, Refusal, Replica, Target, Unknown, Version, VersionConflict

Clock = Callable[[], float]
DISPROVED_S = 2.0


class Fleet:
    """The versions of one incarnation on a changing set of replicas.

    Args:
        run, incarnation: whose versions these are; any other's are refused.
        base_model, dtype: what every replica must serve; None accepts any dtype.
        lora_name: TRL's prefix for version names.
        live_grace_s: a version is live when READY on all routable replicas, or this long after the first READY.
        fail_grace_s: how long a version that failed on all running replicas waits for the ones that are not running.
        stall_after_s, stall_retry_s: no token for the first while requests are in flight takes a replica out of
            routing for the second.
    """

    def __init__(
        self,
        run: str,
        incarnation: str,
        base_model: str,
        clock: Clock,
        *,
        dtype: str | None = None,
        lora_name: str = "trl-policy",
        live_grace_s: float = 5.0,
        fail_grace_s: float = 60.0,
        stall_after_s: float = 30.0,
        stall_retry_s: float = 60.0,
    ) -> None:
        self.run, self.incarnation, self.base_model, self.dtype = run, incarnation, base_model, dtype
        self._clock = clock
        self._names = re.compile(
            rf"(?:{re.escape(lora_name)}|{re.escape(run)}-{re.escape(incarnation)})-v([1-9][0-9]{{0,8}})\Z"
        )
        self._live_grace_s, self._fail_grace_s = live_grace_s, fail_grace_s
        self._stall_after_s, self._stall_retry_s = stall_after_s, stall_retry_s
        self.versions: dict[int, Version] = {}
        self.replicas: dict[str, Replica] = {}
        self.rebuilding = False
        self.revision = 0
        self.accepted = self.live = self.lag_max = 0
        self._events: list[Event] = []
        self._ready: dict[int | None, tuple[str, ...]] = {}

    # -- what happens ------------------------------------------------------------------------------------------

    def accept(self, ref: VersionRef) -> Version:
        """Take a version into the wanted set; a repeat is a no-op. Raises `VersionConflict`."""
        if (ref.run, ref.incarnation) != (self.run, self.incarnation):
            raise VersionConflict(
                f"{ref.name} belongs to run {ref.run}, incarnation {ref.incarnation}; this proxy serves {self.run}, "
                f"{self.incarnation}"
            )
        known = self.versions.get(ref.number)
        if known is None:
            known = self.versions[ref.number] = Version(ref, self._clock())
            self.accepted = max(self.accepted, ref.number)
            self.settle(changed=True)
        elif known.ref != ref:
            raise VersionConflict(f"{ref.name} was announced before with sha256 {known.ref.sha256}, now {ref.sha256}")
        return known

    def unload(self, number: int) -> bool:
        """TRL needs `number` no more. False if it was not known, which is no error."""
        version = self.versions.get(number)
        if version is None:
            return False
        version.unloaded = True
        self.settle()
        return True

    def set_replicas(self, urls: Iterable[str]) -> None:
        urls = list(urls)
        for url in [url for url in self.replicas if url not in urls]:
            del self.replicas[url]
            self._events.append(Event("down", url=url))
        for url in urls:
            self.replicas.setdefault(url, Replica(url, progress_at=self._clock()))
        self.settle(changed=True)

    def observe(self, url: str, status: AgentStatus) -> None:
        """The agent's whole state. One that is older than the last of the same agent is ignored."""
        replica = self.replicas.get(url)
        if replica is None:
            return
        before = replica.status
        same_boot = before is not None and before.boot_id == status.boot_id
        if same_boot and before is not None and status.seq < before.seq:
            return
        if before is not None and not (same_boot and before.engine_epoch == status.engine_epoch):
            self._events.append(Event("restarted", url=url))
            replica.stalled_until = None
            replica.progress_tokens = 0
        if not same_boot or before is None or status.seq > before.seq:
            replica.disproved.clear()
        if status.load.generated_tokens_total != replica.progress_tokens:
            replica.progress_tokens = status.load.generated_tokens_total
            replica.progress_at = self._clock()
            replica.stalled_until = None
        changed = (
            before is None
            or replica.problem is not None
            or (before.boot_id, before.engine_epoch, before.engine)
            != (status.boot_id, status.engine_epoch, status.engine)
            or before.versions != status.versions
        )
        replica.status, replica.problem = status, None
        self.settle(changed=changed)

    def lost(self, url: str, problem: str) -> None:
        """The agent can't be reached; what it last said is not believed until it speaks again."""
        replica = self.replicas.get(url)
        if replica is not None and replica.problem != problem:
            replica.problem = problem
            self.settle(changed=True)

    def disprove(self, url: str, name: str) -> None:
        """A replica answered that it has no such version READY: believe that until it says otherwise, or a moment."""
        replica = self.replicas.get(url)
        if replica is not None:
            replica.disproved[name] = self._clock() + DISPROVED_S
            self.settle(changed=True)

    def hold(self, number: int | None) -> None:
        """A request for `number` is here: it must not retire until `release`."""
        if number is not None:
            self.versions[number].in_flight += 1

    def release(self, number: int | None) -> None:
        if number is None:
            return
        version = self.versions[number]
        version.in_flight -= 1
        if version.in_flight == 0 and (version.unloaded or version.failure):
            self.settle()

    def begin(self, url: str) -> Replica:
        """A request is being sent to a replica; hand what this returns to `end`."""
        replica = self.replicas[url]
        if replica.in_flight == 0:
            replica.progress_at = self._clock()
        replica.in_flight += 1
        return replica

    def end(self, replica: Replica, *, progressed: bool) -> None:
        replica.in_flight -= 1
        if progressed:
            replica.progress_at = self._clock()
            replica.stalled_until = None

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # -- what follows ------------------------------------------------------------------------------------------

    def settle(self, *, changed: bool = False) -> None:
        """Apply the rules to what is known now; to be called now and then, since some depend on time."""
        now = self._clock()
        self._ready.clear()
        changed |= self._settle_replicas(now)
        for number in sorted(self.versions):
            changed |= self._settle_version(self.versions[number], now)
        for version in self.versions.values():
            done = version.unloaded or version.failure is not None
            if not version.retired and done and version.in_flight == 0 and version.ref.number < self.live:
                version.retired = changed = True
                self._events.append(Event("retired", number=version.ref.number))
        self.lag_max = max(self.lag_max, self.lag)
        if changed:
            self._ready.clear()
            self.revision += 1

    def _settle_replicas(self, now: float) -> bool:
        changed = False
        for replica in self.replicas.values():
            for name in [name for name, until in replica.disproved.items() if now >= until]:
                del replica.disproved[name]
                changed = True
            stalls = replica.up and replica.in_flight > 0 and replica.progress_tokens > 0
            if stalls and replica.stalled_until is None and now - replica.progress_at > self._stall_after_s:
                replica.stalled_until = now + self._stall_retry_s
            elif replica.stalled_until is not None and now >= replica.stalled_until:
                replica.stalled_until, replica.progress_at = None, now
            down = replica.problem is not None or not replica.up or replica.stalled_until is not None
            reason = self._why_unroutable(replica)
            if (reason is None) != replica.routable or reason != replica.reason:
                changed = True
                if down and replica.routable:
                    self._events.append(Event("down", url=replica.url))
                replica.routable, replica.reason = reason is None, reason
        return changed

    def _why_unroutable(self, replica: Replica) -> str | None:
        status = replica.status
        if replica.problem is not None or status is None:
            return replica.problem or "no word from its agent yet"
        if status.engine != "ready":
            return f"its engine is {status.engine}" + (f": {status.reason}" if status.reason else "")
        if status.base_model != self.base_model:
            return f"it serves the base {status.base_model!r}, this run needs {self.base_model!r}"
        if self.dtype is not None and status.dtype != self.dtype:
            return f"it computes in {status.dtype}, this run needs {self.dtype}"
        if replica.stalled_until is not None:
            return f"no token in {self._stall_after_s:g} s with requests in flight"
        for other in self.replicas.values():
            name = self._failed_by_only_the_first(replica, other)
            # Two that each fail what the other loads are both left in: each serves what it has, and the run goes on.
            if name is not None and self._failed_by_only_the_first(other, replica) is None:
                return f"quarantined: it failed {name}, which others load: {status.versions[name].reason}"
        return None

    def _failed_by_only_the_first(self, first: Replica, second: Replica) -> str | None:
        """A version that is still needed, FAILED on `first` and READY on `second`; None if there is no such one."""
        if not (first.up and second.up):
            return None
        for version in self.versions.values():
            name = version.ref.name
            failed, ready = first.state(name) is VersionState.FAILED, second.state(name) is VersionState.READY
            if not version.retired and failed and ready:
                return name
        return None

    def _settle_version(self, version: Version, now: float) -> bool:
        if version.retired or version.failure is not None or version.live_at is not None:
            return False
        number = version.ref.number
        ready = self.ready_on(number)
        if ready:
            version.first_failed_at = None
            if version.first_ready_at is None:
                version.first_ready_at = now
            everywhere = len(ready) == sum(replica.routable for replica in self.replicas.values())
            if everywhere or now - version.first_ready_at >= self._live_grace_s:
                version.live_at = now
                self.live = max(self.live, number)
                self._events.append(Event("live", number=number))
                return True
            return False
        failures = self._failures(version)
        if not failures:
            version.first_failed_at = None
            return False
        if version.first_failed_at is None:
            version.first_failed_at = now
        up = [replica for replica in self.replicas.values() if replica.up]
        waiting_for_others = len(up) < len(self.replicas) and now - version.first_failed_at < self._fail_grace_s
        if len(failures) == len(up) and not waiting_for_others:
            version.failure = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            self._events.append(Event("failed", number=number))
            return True
        return False

    def _failures(self, version: Version) -> dict[str, str]:
        name = version.ref.name
        return {
            replica.name: replica.status.versions[name].reason or "no reason given"
            for replica in self.replicas.values()
            if replica.up and replica.status is not None and replica.state(name) is VersionState.FAILED
        }

    # -- what is asked -----------------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        return max(0, self.accepted - self.live)

    def number_of(self, model: str) -> int | None:
        """The version that a model name means, whether it exists or not; None if it names none of this run's."""
        match = self._names.match(model)
        return int(match[1]) if match else None

    def resolve(self, model: str) -> Target | Refusal | Unknown:
        """What should answer a request for `model`. The caller holds the target's version until it has answered."""
        if model == self.base_model:
            return Target(None, self.base_model)
        number = self.number_of(model)
        if number is None:
            return Refusal(404, f"model {model!r} is neither the base model nor a version of run {self.run}")
        version = self.versions.get(number)
        if version is not None and not version.retired:
            if version.failure is not None:
                return Refusal(503, f"version {number} failed on every replica: {version.failure}")
            return Target(number, version.ref.name)
        if version is None and self.rebuilding:
            return Unknown(f"the proxy has just started and has not heard of version {number} yet")
        if version is None and number > self.accepted:
            return Refusal(404, f"version {number} was never published; the newest accepted one is {self.accepted}")
        if self.live == 0:
            return Refusal(503, f"version {number} is not here and no version is live yet")
        return Target(self.live, self.versions[self.live].ref.name, late=True)

    def ready_on(self, number: int | None) -> tuple[str, ...]:
        """URLs of the replicas that may be sent a request for `number` (None: the base model)."""
        ready = self._ready.get(number)
        if ready is None:
            name = served_name(self.run, self.incarnation, number) if number else None
            ready = self._ready[number] = tuple(
                replica.url
                for replica in self.replicas.values()
                if replica.routable and (name is None or replica.state(name) is VersionState.READY)
            )
        return ready

    def why_not_ready(self, number: int | None) -> str:
        """For a person: why no replica can answer for `number` now."""
        if not self.replicas:
            return "no replica is known"
        reasons = []
        for replica in self.replicas.values():
            if not replica.routable:
                reasons.append(f"{replica.name}: {replica.reason}")
            elif number is not None:
                state = replica.state(served_name(self.run, self.incarnation, number))
                reasons.append(f"{replica.name}: version {number} is {state or 'not there'}")
        return "; ".join(reasons)

    def wanted(self) -> list[VersionRef]:
        """Every version that each replica should hold, oldest first."""
        return [version.ref for _, version in sorted(self.versions.items()) if not version.retired]

    def strangers(self) -> set[int]:
        """Versions of this incarnation that agents hold and that were never announced here: a restart lost them."""
        numbers = set()
        for replica in self.replicas.values():
            for name, version in (replica.status.versions if replica.status else {}).items():
                number = self.number_of(name)
                gone = version.state in (VersionState.UNLOADED, VersionState.RETIRING)
                if number is not None and number not in self.versions and not gone:
                    numbers.add(number)
        return numbers

    def liveness(self, number: int) -> VersionLiveness | None:
        """What `GET /versions/<name>` answers; None if it was never announced."""
        version = self.versions.get(number)
        if version is None:
            return None
        name = version.ref.name
        return VersionLiveness(
            name=name,
            state=version.state,
            ready_on=[r.name for r in self.replicas.values() if r.up and r.state(name) is VersionState.READY],
            failed_on=self._failures(version),
            reason=version.failure or (None if version.live_at is not None else self.why_not_ready(number)),
            published_to_live_s=None if version.live_at is None else version.live_at - version.accepted_at,
        )
