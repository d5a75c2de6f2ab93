"""Whatever happens, a version makes legal moves only, and ends where the wish says once nothing more goes wrong."""

from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState
from bucket_grpo.inference.lifecycle import IN_ENGINE, Do, Held, after_engine_loss, check_move, decide

S = VersionState
IN_VLLM = {S.LOADED, S.READY, S.RETIRING}


def ref(number: int) -> VersionRef:
    return VersionRef(run="r", incarnation="20261130t154500z-a1b2c3", number=number, sha256="0" * 64, size=1, step=0)


class World:
    """A replica reduced to its version states: every outcome that a step may have, chosen by the test."""

    def __init__(self) -> None:
        self.wanted: dict[str, VersionRef] = {}
        self.have: dict[str, Held] = {}
        self.engine_ready = False

    def move(self, name: str, state: VersionState) -> None:
        held = self.have[name]
        check_move(name, held.state, state)
        self.have[name] = Held(held.ref, state, held.in_flight)

    def steps(self) -> list[tuple[Do, VersionRef]]:
        return decide(self.wanted, self.have, engine_ready=self.engine_ready)

    def act(self, do: Do, version: VersionRef, goes_well: bool = True) -> None:
        name = version.name
        if do is Do.ADD:
            assert name not in self.have or self.have[name].state is S.UNLOADED
            self.have[name] = Held(version, S.WANTED)
        elif do is Do.STAGE:
            self.move(name, S.STAGING)
        elif do is Do.LOAD:
            self.move(name, S.LOADED if goes_well else S.FAILED)
        elif do is Do.PROVE:
            self.move(name, S.READY if goes_well else S.FAILED)
        elif do is Do.RETIRE:
            self.move(name, S.RETIRING)
        else:
            self.move(name, S.UNLOADED)

    def finish_staging(self, goes_well: bool = True) -> None:
        for name, held in list(self.have.items()):
            if held.state is S.STAGING:
                self.move(name, S.STAGED if goes_well else S.FAILED)

    def lose_engine(self) -> None:
        self.engine_ready = False
        for name, held in list(self.have.items()):
            state = after_engine_loss(held.state)
            if state is not held.state:
                self.move(name, state)

    def settle(self) -> None:
        self.engine_ready = True
        self.have = {name: Held(held.ref, held.state, 0) for name, held in self.have.items()}
        for _ in range(200):
            self.finish_staging()
            steps = self.steps()
            if not steps:
                return
            self.act(*steps[0])
        raise AssertionError(f"does not settle: {self.have}")


events = st.lists(
    st.one_of(
        st.tuples(st.just("want"), st.sets(st.integers(1, 4))),
        st.tuples(st.just("step"), st.booleans()),
        st.tuples(st.just("staging ends"), st.booleans()),
        st.tuples(st.just("engine ready"), st.none()),
        st.tuples(st.just("engine lost"), st.none()),
        st.tuples(st.just("requests"), st.integers(0, 2)),
    ),
    max_size=60,
)


def play(happened: list) -> World:
    world = World()
    for event, detail in happened:
        if event == "want":
            world.wanted = {ref(n).name: ref(n) for n in detail}
        elif event == "step" and (steps := world.steps()):
            world.act(*steps[0], goes_well=detail)
        elif event == "staging ends":
            world.finish_staging(detail)
        elif event == "engine ready":
            world.engine_ready = True
        elif event == "engine lost":
            world.lose_engine()
        elif event == "requests":
            world.have = {name: Held(held.ref, held.state, detail) for name, held in world.have.items()}
    return world


@given(events)
def test_only_legal_moves_whatever_happens(happened: list) -> None:
    play(happened)  # `World.move` raises on an illegal one


@given(events)
def test_it_settles_where_the_wish_says(happened: list) -> None:
    world = play(happened)
    failed = {name for name, held in world.have.items() if held.state is S.FAILED}
    world.settle()
    for name, held in world.have.items():
        if name in world.wanted:
            assert held.state is S.READY or (name in failed and held.state is S.FAILED)
        else:
            assert held.state is S.UNLOADED
    assert set(world.wanted) <= set(world.have)


@given(events)
def test_nothing_is_asked_of_an_engine_that_is_not_ready(happened: list) -> None:
    world = play(happened)
    world.engine_ready = False
    assert not {do for do, _ in world.steps()} & IN_ENGINE


@given(events)
def test_a_version_with_requests_in_flight_is_never_unloaded(happened: list) -> None:
    world = play(happened)
    busy = {name for name, held in world.have.items() if held.in_flight}
    assert not {version.name for do, version in world.steps() if do is Do.UNLOAD} & busy


@given(events)
def test_after_a_restart_of_the_engine_nothing_counts_as_loaded(happened: list) -> None:
    world = play(happened)
    world.lose_engine()
    assert not {held.state for held in world.have.values()} & IN_VLLM


def test_the_newest_version_comes_first() -> None:
    wanted = {ref(n).name: ref(n) for n in (3, 1, 10, 2)}
    assert [version.number for _, version in decide(wanted, {}, engine_ready=True)] == [10, 3, 2, 1]
