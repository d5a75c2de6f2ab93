"""The proxy's parts in one place: fleet, router, journal, agents, counters; and the tasks that keep them true."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.bucket_sync.wire import Wanted
from bucket_grpo.proxy.change import Signal
from bucket_grpo.proxy.config import ProxyConfig, Secrets
from bucket_grpo.proxy.fleet import Fleet
from bucket_grpo.proxy.fleet_state import Replica, Version
from bucket_grpo.proxy.journal import Journal
from bucket_grpo.proxy.router import Router
from bucket_grpo.proxy.upstream import Agents, UpstreamError
from bucket_grpo.proxy.version_log import VersionLog

POLL_WAIT_S = 5.0
POLL_PAUSE_S = 0.05
REPEAT_WANTED_S = 10.0
TICK_S = 0.2
RATE_WINDOW_S = 10
log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Since the start of this process. `failed`: the proxy itself had to answer 5xx."""

    requests: int = 0
    affinity: int = 0
    cold: int = 0
    spilled: int = 0
    parked: int = 0
    retried: int = 0
    late: int = 0
    failed: int = 0


class TokenRate:
    """Completion tokens per second over the last `RATE_WINDOW_S` whole seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._seconds: deque[tuple[int, int]] = deque()

    def add(self, tokens: int) -> None:
        self.total += tokens
        now = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1] = (now, self._seconds[-1][1] + tokens)
        else:
            self._seconds.append((now, tokens))
            self._trim(now)

    def per_second(self) -> float:
        now = int(time.monotonic())
        self._trim(now)
        return sum(tokens for second, tokens in self._seconds if second < now) / RATE_WINDOW_S

    def _trim(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] < now - RATE_WINDOW_S:
            self._seconds.popleft()


@dataclass(eq=False)
class Attempt:
    """A request that is being answered by a replica; `interrupted` says why it was taken from it."""

    task: "asyncio.Task[None]"
    interrupted: str | None = None


@dataclass
class ReplicaTasks:
    poll: "asyncio.Task[None]"
    push: "asyncio.Task[None]"


class Service:
    """Start with `start`, end with `close`; everything in between runs on one event loop."""

    def __init__(self, config: ProxyConfig, secrets: Secrets) -> None:
        self.config, self.secrets = config, secrets
        self.fleet = Fleet(
            config.run,
            config.incarnation,
            config.base_model,
            time.monotonic,
            dtype=config.dtype,
            lora_name=config.lora_name,
            live_grace_s=config.live_grace_s,
            fail_grace_s=config.fail_grace_s,
            stall_after_s=config.stall_after_s,
            stall_retry_s=config.stall_retry_s,
        )
        self.router = Router()
        self.counters = Counters()
        self.tokens = TokenRate()
        self.changed = Signal()
        self.parked = self.in_flight = 0
        self._seen_revision = -1
        self._tasks: dict[str, ReplicaTasks] = {}
        self._attempts: dict[str, set[Attempt]] = {}
        self._version_log = VersionLog(config.journal_dir, config.incarnation)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.journal = Journal(self.config.journal_dir, self.config.journal_sample_frac)
        self.agents = Agents(self.secrets.agent_token)
        announced = self._version_log.read()
        for ref in announced.refs:
            self.fleet.accept(ref)
        for number in announced.unloaded:
            self.fleet.unload(number)
        self.started_at = time.monotonic()
        self.fleet.rebuilding = True
        self._set_replicas(announced.replicas if announced.replicas is not None else self.config.replicas)
        self._ticker = asyncio.create_task(self._tick(), name="tick")

    async def close(self) -> None:
        tasks = [task for pair in self._tasks.values() for task in (pair.poll, pair.push)]
        tasks += [self._ticker] if self._ticker else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.agents.close()
        await asyncio.to_thread(self.journal.close)

    # -- what others ask for -----------------------------------------------------------------------------------

    def accept(self, ref: VersionRef) -> Version:
        """Raises `VersionConflict`. Once this returns, a restart remembers the version."""
        new = ref.number not in self.fleet.versions
        version = self.fleet.accept(ref)
        if new:
            self._version_log.accepted(ref)
        self.apply()
        return version

    def unload(self, number: int) -> bool:
        version = self.fleet.versions.get(number)
        if version is not None and not version.unloaded:
            self._version_log.unloaded(number)
        known = self.fleet.unload(number)
        self.apply()
        return known

    def set_replicas(self, urls: list[str]) -> None:
        """Exactly these from now on; survives a restart."""
        if urls != list(self.fleet.replicas):
            self._version_log.replicas(urls)
            self._set_replicas(urls)

    @contextmanager
    def attempt(self, url: str) -> Iterator[Attempt]:
        """The current task sends a request to `url`: it is cancelled, with the reason, if that replica goes down."""
        task = asyncio.current_task()
        assert task is not None, "an attempt belongs to a task"
        attempt = Attempt(task)
        attempts = self._attempts.setdefault(url, set())
        attempts.add(attempt)
        try:
            yield attempt
        finally:
            attempts.discard(attempt)

    def apply(self) -> None:
        """Act on what the fleet has found out: tell the router, take requests off dead replicas, wake who waits."""
        for event in self.fleet.take_events():
            if event.url is not None:
                self.router.forget_replica(event.url)
                replica = self.fleet.replicas.get(event.url)
                reason = "it left the fleet" if replica is None else replica.reason or "it was restarted"
                log.warning("replica %s: %s", event.url, reason)
                self._interrupt(event.url, reason)
            elif event.number is not None:
                log.info("version %d is %s", event.number, event.kind)
                if event.kind == "retired":
                    self.router.forget_version(event.number)
        if self.fleet.revision != self._seen_revision:
            self._seen_revision = self.fleet.revision
            self.changed.fire()

    def lost(self, url: str, reason: str) -> None:
        self.fleet.lost(url, reason)
        self.apply()

    # -- tasks -------------------------------------------------------------------------------------------------

    def _interrupt(self, url: str, reason: str) -> None:
        for attempt in self._attempts.get(url, ()):
            # A task that finds out by itself is not in need of a cancellation: it would come at its next await.
            if attempt.interrupted is None and attempt.task is not asyncio.current_task():
                attempt.interrupted = reason
                attempt.task.cancel()

    def _set_replicas(self, urls: list[str]) -> None:
        self.fleet.set_replicas(urls)
        for url in [url for url in self._tasks if url not in urls]:
            tasks = self._tasks.pop(url)
            tasks.poll.cancel()
            tasks.push.cancel()
        for url in urls:
            if url not in self._tasks:
                self._tasks[url] = ReplicaTasks(
                    poll=asyncio.create_task(self._poll(url), name=f"poll {url}"),
                    push=asyncio.create_task(self._push(url), name=f"push {url}"),
                )
        self.apply()

    async def _poll(self, url: str) -> None:
        """Follow one agent's state; two failures in a row and it is taken for lost until it speaks again."""
        after, failures = -1, 0
        while True:
            try:
                status = await self.agents.status(url, after, POLL_WAIT_S if after >= 0 else 0)
            except UpstreamError as error:
                failures, after = failures + 1, -1
                if error.refused or failures >= 2:
                    self.lost(url, str(error))
                await asyncio.sleep(min(0.1 * 2**failures, 1.0))
                continue
            failures, after = 0, status.seq
            self.fleet.observe(url, status)
            self.apply()
            await asyncio.sleep(POLL_PAUSE_S)

    async def _push(self, url: str) -> None:
        """Tell one agent what is wanted: on each change, when it has restarted, and now and then."""
        told: tuple[list[VersionRef], str | None] | None = None
        told_at = 0.0
        while True:
            replica = self.fleet.replicas.get(url)
            if replica is None or replica.status is None or replica.problem is not None or not self._may_push(replica):
                told = None
                await self.changed.wait(1.0)
                continue
            wish = (self.fleet.wanted(), replica.status.boot_id)
            if wish == told and time.monotonic() - told_at < REPEAT_WANTED_S:
                await self.changed.wait(REPEAT_WANTED_S / 4)
                continue
            try:
                status = await self.agents.put_wanted(url, Wanted(versions=wish[0]))
            except UpstreamError as error:
                log.warning("replica %s was not told what is wanted: %s", url, error)
                await asyncio.sleep(0.5)
                continue
            told, told_at = wish, time.monotonic()
            self.fleet.observe(url, status)
            self.apply()

    def _may_push(self, replica: Replica) -> bool:
        """Not while a restart may have forgotten versions that this agent holds: a wish without them drops them."""
        if not self.fleet.rebuilding or replica.status is None:
            return True
        names = {name for name in replica.status.versions if self.fleet.number_of(name) is not None}
        return names <= {version.ref.name for version in self.fleet.versions.values()}

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.fleet.rebuilding:
                heard = all(replica.status for replica in self.fleet.replicas.values()) and self.fleet.replicas
                settled = heard and not self.fleet.strangers()
                if settled or time.monotonic() - self.started_at > self.config.rebuild_grace_s:
                    self.fleet.rebuilding = False
                    self.changed.fire()
            self.fleet.settle()
            self.apply()

    # -- what is shown -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """The body of `GET /status`."""
        fleet = self.fleet
        versions = []
        for number in sorted(fleet.versions):
            liveness = fleet.liveness(number)
            if liveness is not None:
                version = fleet.versions[number]
                entry = {"number": number, "in_flight": version.in_flight, "unloaded": version.unloaded}
                versions.append({**liveness.model_dump(), **entry})
        return {
            "run": fleet.run,
            "incarnation": fleet.incarnation,
            "replicas": [self._replica_status(replica) for replica in fleet.replicas.values()],
            "versions": versions,
            "live": fleet.live,
            "accepted": fleet.accepted,
            "lag": fleet.lag,
            "lag_max": fleet.lag_max,
            "parked": self.parked,
            "in_flight": self.in_flight,
            "tokens_per_s": self.tokens.per_second(),
            "tokens_total": self.tokens.total,
            "routing": asdict(self.counters),
            "journal": {
                "path": str(self.journal.path),
                "written": self.journal.written,
                "dropped": self.journal.dropped,
                "error": self.journal.error,
            },
        }

    def _replica_status(self, replica: Replica) -> dict[str, object]:
        status = replica.status
        return {
            "url": replica.url,
            "replica": replica.name,
            "engine": status.engine if status and replica.problem is None else "unreachable",
            "routable": replica.routable,
            "reason": replica.reason,
            "in_flight": replica.in_flight,
            "versions": {name: version.state for name, version in status.versions.items()} if status else {},
            "load": status.load.model_dump() if status else None,
            "loads": status.loads if status else 0,
            "load_retries": status.load_retries if status else 0,
            "load_failures": status.load_failures if status else 0,
            "engine_restarts": status.engine_restarts if status else 0,
            "rejected": status.rejected if status else {},
        }
