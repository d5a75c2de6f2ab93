"""What the fleet view promises, whatever agents, trainer and clock do, in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from proxy_harness import BASE, INCARNATION, RUN, name, ref

from bucket_grpo.bucket_sync.vocabulary import VersionState
from bucket_grpo.bucket_sync.wire import AgentStatus, Load, VersionStatus
from bucket_grpo.proxy.fleet import Fleet
from bucket_grpo.proxy.fleet_state import Replica, Target

URLS = ("http://a", "http://b", "http://c")
NAMES = {"http://a": "a", "http://b": "b", "http://c": "c"}
FINAL = [VersionState.WANTED, VersionState.STAGED, VersionState.LOADED, VersionState.READY, VersionState.FAILED]


class TrueAgent:
    """What is the case on a replica, which the fleet only learns through `observe`."""

    def __init__(self) -> None:
        self.boot, self.epoch, self.seq, self.engine, self.tokens = 1, 1, 0, "starting", 0
        self.versions: dict[str, VersionState] = {}

    def status(self, url: str) -> AgentStatus:
        self.seq += 1
        return AgentStatus(
            seq=self.seq,
            replica=NAMES[url],
            boot_id=str(self.boot),
            engine_epoch=self.epoch,
            engine=self.engine,  # type: ignore[arg-type]
            base_model=BASE,
            dtype="float32",
            versions={key: VersionStatus(state=state, reason="why") for key, state in self.versions.items()},
            load=Load(generated_tokens_total=self.tokens),
        )


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.fleet = Fleet(RUN, INCARNATION, BASE, lambda: self.now, dtype="float32", stall_after_s=30)
        self.agents = {url: TrueAgent() for url in URLS}
        self.heard: dict[str, AgentStatus] = {}
        self.requests: list[tuple[Target, Replica]] = []
        self.held: list[Target] = []
        self.highest_live = 0
        self.fleet.set_replicas(URLS[:2])
        for url in URLS[:2]:
            self.agents[url].engine = "ready"
            self.hear(url, progress=True)

    # -- what may happen

    @rule(states=st.lists(st.sampled_from([VersionState.READY, *FINAL]), min_size=3, max_size=3))
    def publish_the_next_version(self, states: list[VersionState]) -> None:
        number = self.fleet.accepted + 1
        self.announce(number)
        for url, state in zip(URLS, states, strict=True):
            self.version_moves(url, number, state)
            self.hear(url, progress=True)

    @rule(back=st.integers(1, 3))
    def trl_unloads_an_older_version(self, back: int) -> None:
        self.unload(max(1, self.fleet.live - back))

    @rule(number=st.integers(1, 8))
    def announce(self, number: int) -> None:
        self.fleet.accept(ref(number))

    @rule(number=st.integers(1, 6))
    def unload(self, number: int) -> None:
        self.fleet.unload(number)

    @rule(url=st.sampled_from(URLS), number=st.integers(1, 8), state=st.sampled_from(FINAL))
    def version_moves(self, url: str, number: int, state: VersionState) -> None:
        if self.agents[url].engine == "ready":
            self.agents[url].versions[name(number)] = state

    @rule(url=st.sampled_from(URLS), engine=st.sampled_from(["starting", "ready", "ready", "dead", "stalled"]))
    def engine_changes(self, url: str, engine: str) -> None:
        agent = self.agents[url]
        if agent.engine == "ready" and engine != "ready":
            agent.epoch += 1
            agent.versions = dict.fromkeys(agent.versions, VersionState.STAGED)
        agent.engine = engine

    @rule(url=st.sampled_from(URLS))
    def agent_restarts(self, url: str) -> None:
        agent = self.agents[url]
        agent.boot, agent.seq, agent.engine, agent.versions, agent.tokens = agent.boot + 1, 0, "starting", {}, 0

    @rule(url=st.sampled_from(URLS), progress=st.booleans())
    def hear(self, url: str, progress: bool) -> None:
        agent = self.agents[url]
        agent.tokens += 5 if progress else 0
        status = agent.status(url)
        self.fleet.observe(url, status)
        if url in self.fleet.replicas:
            self.heard[url] = status

    @rule(url=st.sampled_from(URLS))
    def old_news_arrives_late(self, url: str) -> None:
        if url in self.heard and self.heard[url].seq > 1:
            stale = self.heard[url].model_copy(update={"seq": 0, "versions": {name(1): VersionStatus(state="READY")}})
            self.fleet.observe(url, stale)

    @rule(url=st.sampled_from(URLS))
    def lose(self, url: str) -> None:
        self.fleet.lost(url, "connection refused")
        self.heard.pop(url, None)

    @rule(urls=st.lists(st.sampled_from(URLS), unique=True))
    def replicas_join_and_leave(self, urls: list[str]) -> None:
        self.fleet.set_replicas(urls)
        self.heard = {url: status for url, status in self.heard.items() if url in urls}

    @rule(seconds=st.sampled_from([0.1, 3.0, 10.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.settle()

    @rule(back=st.integers(-1, 3))
    def request_arrives(self, back: int) -> None:
        number = max(0, self.fleet.live - back)
        target = self.fleet.resolve(f"trl-policy-v{number}" if number else BASE)
        if not isinstance(target, Target):
            return
        assert target.late or target.number in (number, None)
        self.fleet.hold(target.number)
        ready = self.fleet.ready_on(target.number)
        if not ready:
            self.held.append(target)
            return
        for url in ready:
            self._assert_may_answer(url, target)
        self.requests.append((target, self.fleet.begin(ready[0])))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), progressed=st.booleans())
    def request_ends(self, data: st.DataObject, progressed: bool) -> None:
        target, replica = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.fleet.end(replica, progressed=progressed)
        self.fleet.release(target.number)

    @precondition(lambda self: self.held)
    @rule()
    def parked_request_goes_on_or_gives_up(self) -> None:
        target = self.held.pop()
        ready = self.fleet.ready_on(target.number)
        if ready:
            self._assert_may_answer(ready[0], target)
            self.requests.append((target, self.fleet.begin(ready[0])))
        else:
            self.fleet.release(target.number)

    # -- what must hold

    def _assert_may_answer(self, url: str, target: Target) -> None:
        heard = self.heard.get(url)
        assert heard is not None, "sent to a replica that was not heard of"
        assert heard.engine == "ready"
        if target.number is not None:
            assert heard.versions[name(target.number)].state is VersionState.READY

    @invariant()
    def requests_go_only_where_the_version_is_ready(self) -> None:
        for number in (None, *self.fleet.versions):
            for url in self.fleet.ready_on(number):
                self._assert_may_answer(url, Target(number, ""))

    @invariant()
    def live_never_goes_back_and_never_passes_accepted(self) -> None:
        assert self.highest_live <= self.fleet.live <= self.fleet.accepted
        self.highest_live = self.fleet.live

    @invariant()
    def a_version_retires_only_unneeded_unused_and_with_a_newer_one_live(self) -> None:
        used = {target.number for target, _ in self.requests} | {target.number for target in self.held}
        wanted = {version.number for version in self.fleet.wanted()}
        for number, version in self.fleet.versions.items():
            if version.retired:
                assert version.unloaded or version.failure
                assert number not in used
                assert number < self.fleet.live
            assert (number in wanted) != version.retired

    @invariant()
    def a_replica_that_fails_what_a_sound_one_loads_gets_nothing(self) -> None:
        """Sound: it does not itself fail what the other one loads."""
        up = [url for url, heard in self.heard.items() if heard.engine == "ready"]
        for url in up:
            shown_up = any(self._fails_what(url, other) and not self._fails_what(other, url) for other in up)
            assert not (shown_up and url in self.fleet.ready_on(None))

    def _fails_what(self, one: str, other: str) -> bool:
        def state(url: str, number: int) -> VersionState | None:
            held = self.heard[url].versions.get(name(number))
            return None if held is None else held.state

        return any(
            state(one, number) is VersionState.FAILED and state(other, number) is VersionState.READY
            for number, version in self.fleet.versions.items()
            if not version.retired
        )

    @invariant()
    def in_flight_counts_are_exact(self) -> None:
        for number, version in self.fleet.versions.items():
            mine = [target for target, _ in self.requests if target.number == number]
            assert version.in_flight == len(mine) + sum(target.number == number for target in self.held)

    def teardown(self) -> None:
        """A whole fleet again: counts return to 0, and nothing that was accepted can be waited for in vain."""
        for target, replica in self.requests:
            self.fleet.end(replica, progressed=True)
            self.fleet.release(target.number)
            assert replica.in_flight >= 0
        for target in self.held:
            self.fleet.release(target.number)
        self.requests, self.held = [], []
        assert all(version.in_flight == 0 for version in self.fleet.versions.values())
        assert all(replica.in_flight == 0 for replica in self.fleet.replicas.values())
        self.fleet.set_replicas(URLS)
        for url, agent in self.agents.items():
            agent.engine = "ready"
            agent.versions = {version.name: VersionState.READY for version in self.fleet.wanted()}
            self.fleet.observe(url, agent.status(url))
        self.now += 100
        self.fleet.settle()
        for number, version in self.fleet.versions.items():
            target = self.fleet.resolve(f"trl-policy-v{number}")
            if version.failure is None or version.retired:
                assert isinstance(target, Target)
                assert set(self.fleet.ready_on(target.number)) == set(URLS)
                assert version.state in ("live", "retired")
        assert set(self.fleet.ready_on(None)) == set(URLS)


TestFleetStates = FleetMachine.TestCase
TestFleetStates.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
