"""Where requests are placed, and what may never happen whatever the order of events."""

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bucket_grpo.proxy.router import Placement, Router

TWO = ("a", "b")
TEMPLATE = list(range(100, 123))


class Asker:
    """Places requests by token ids; remembers what is open."""

    def __init__(self, **settings: float) -> None:
        self.router = Router(**settings)  # type: ignore[arg-type]
        self.open: list[Placement] = []

    def ask(self, prompt: list[int], candidates: tuple[str, ...] = TWO, version: int = 1) -> Placement:
        packed = array("I", prompt).tobytes()
        placement = self.router.place(version, packed, packed, 1000, candidates)
        self.open.append(placement)
        return placement

    def group(self, prompt: list[int], candidates: tuple[str, ...] = TWO, size: int = 8) -> list[Placement]:
        return [self.ask(prompt, candidates) for _ in range(size)]

    def end_all(self, seconds_per_token: dict[str, float] | None = None, tokens: int = 200) -> None:
        for placement in self.open:
            pace = (seconds_per_token or {}).get(placement.url, 0.01)
            self.router.finish(placement, tokens=tokens, seconds=tokens * pace)
        self.open.clear()


def prompt_of(index: int) -> list[int]:
    return [*TEMPLATE, *range(1000 * index, 1000 * index + 60)]


def test_a_group_is_cold_once_and_then_stays_where_its_prompt_is_cached() -> None:
    asker = Asker()
    placements = asker.group(prompt_of(1))
    assert [placement.route for placement in placements] == ["cold"] + ["affinity"] * 7
    assert len({placement.url for placement in placements}) == 1


def test_groups_are_spread_evenly_and_a_shared_template_attracts_nothing() -> None:
    asker = Asker()
    owners = [asker.group(prompt_of(index))[0].url for index in range(40)]
    assert 19 <= owners.count("a") <= 21


def test_the_first_request_of_a_group_already_counts_for_all_of_it() -> None:
    asker = Asker()
    for index in range(20):
        asker.group(prompt_of(index))
        asker.end_all()
    for _ in range(2):
        asker.ask(prompt_of(50), ("a",))
    assert asker.ask(prompt_of(51)).url == "b"
    assert asker.ask(prompt_of(52)).url == "a", "seven more of the group before are on their way to b"


def test_the_next_turn_of_a_conversation_follows_the_longest_prompt_that_it_extends() -> None:
    asker = Asker()
    turn_2, turn_3 = [*prompt_of(1), *range(50_000, 50_030)], [*prompt_of(1), *range(50_000, 50_060)]
    asker.ask(prompt_of(1), ("a",))
    asker.ask(turn_2, ("b",))
    follower = asker.ask(turn_3)
    assert (follower.route, follower.url) == ("affinity", "b")


def test_the_next_turn_is_followed_within_a_version_only() -> None:
    asker = Asker()
    asker.ask(prompt_of(1))
    assert asker.ask([*prompt_of(1), 7, 8, 9], version=2).route == "cold"


def test_an_idle_replica_does_not_lure_a_group_away() -> None:
    asker = Asker()
    for index in range(2):
        asker.group(prompt_of(index), ("a",))
    assert {placement.url for placement in asker.group(prompt_of(0), TWO)} == {"a"}


def test_a_replica_that_was_slow_is_tried_again_after_a_while() -> None:
    asker = Asker()
    for index in range(40):
        asker.group(prompt_of(index))
        asker.end_all({"a": 0.01, "b": 0.1})
    assert asker.ask(prompt_of(100)).url == asker.ask(prompt_of(101)).url == "a"
    asker.end_all({"a": 0.01, "b": 0.1})
    for index in range(400):
        placement = asker.group(prompt_of(200 + index))[0]
        asker.end_all({"a": 0.01, "b": 0.01})
        if placement.url == "b":
            return
    raise AssertionError("b was never tried again")


def test_a_prompt_that_comes_back_later_is_not_bound_to_a_busy_replica() -> None:
    asker = Asker()
    for index in range(20):
        asker.group(prompt_of(index), ("a",))
        asker.end_all()
    asker.group(prompt_of(100), ("a",))
    again = asker.group(prompt_of(0), TWO)
    assert {placement.url for placement in again} == {"b"}
    asker.end_all()
    for index in range(200, 220):
        asker.group(prompt_of(index), TWO)
        asker.end_all()
    assert asker.ask(prompt_of(0), TWO).url == "b", "where it was cached last, all else being equal"


def test_far_behind_a_group_moves_as_a_whole() -> None:
    asker = Asker()
    for index in range(100):
        asker.group(prompt_of(index), ("a",))
    moved = asker.group(prompt_of(99), TWO)
    assert moved[0].route == "spilled"
    assert {placement.url for placement in moved} == {"b"}
    assert [placement.route for placement in moved[1:]] == ["affinity"] * 7


def test_a_replica_at_half_speed_gets_clearly_less() -> None:
    asker = Asker()
    counts = {"a": 0, "b": 0}
    for index in range(300):
        counts[asker.group(prompt_of(index))[0].url] += 1
        if index % 10 == 9:
            asker.end_all({"a": 0.01, "b": 0.02})
    assert counts["b"] < 0.6 * counts["a"]


def test_a_lost_replica_is_never_chosen_and_its_groups_move_on() -> None:
    asker = Asker()
    owner = asker.ask(prompt_of(1)).url
    other = "b" if owner == "a" else "a"
    again = asker.ask(prompt_of(1), (other,))
    assert (again.route, again.url) == ("cold", other)
    assert asker.ask(prompt_of(1), TWO).url == other, "it stays where its prompt is now"


def test_a_restart_clears_what_was_believed_of_a_replica() -> None:
    asker = Asker()
    owner = asker.ask(prompt_of(1)).url
    asker.router.forget_replica(owner)
    assert asker.ask(prompt_of(1)).route == "cold"


def test_a_retired_version_is_forgotten() -> None:
    asker = Asker()
    asker.ask(prompt_of(1), version=3)
    asker.router.forget_version(3)
    assert asker.ask(prompt_of(1), version=3).route == "cold"


def test_memory_is_bounded_within_a_version() -> None:
    asker = Asker(max_groups=50)
    for index in range(500):
        asker.ask(prompt_of(index))
    prompts = asker.router._versions[1]
    assert len(prompts.groups) == len(prompts.ends) == 50
    assert len(prompts.tail_lengths) == 50


def test_expected_length_follows_what_is_seen_and_starts_from_the_version_before() -> None:
    asker = Asker()
    for index in range(300):
        asker.ask(prompt_of(index))
        asker.end_all(tokens=900)
    assert 800 < asker.router.expected_tokens(1) <= 900
    assert asker.router.expected_tokens(2) == asker.router.expected_tokens(1)


@given(st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=70), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_only_a_whole_known_prompt_attracts_a_longer_one(prompts: list[list[int]]) -> None:
    asker = Asker()
    seen: list[list[int]] = []
    for prompt in prompts:
        known = prompt in seen
        extends = any(len(old) >= 16 and prompt[: len(old)] == old for old in seen if len(old) < len(prompt))
        placement = asker.ask(prompt)
        assert (placement.route != "cold") == (known or extends)
        seen.append(prompt)


class RouterMachine(RuleBasedStateMachine):
    """Requests begin, end and fail, replicas restart, versions retire, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.asker = Asker(open_groups=4, max_groups=8)

    @rule(
        prompt=st.integers(0, 12),
        version=st.integers(0, 3),
        candidates=st.sampled_from([("a",), ("a", "b"), ("b", "c"), ("a", "b", "c")]),
        turns=st.integers(0, 2),
    )
    def ask(self, prompt: int, version: int, candidates: tuple[str, ...], turns: int) -> None:
        extended = prompt_of(prompt) + [5] * 20 * turns
        assert self.asker.ask(extended, candidates, version).url in candidates

    @precondition(lambda self: self.asker.open)
    @rule(data=st.data(), tokens=st.integers(0, 3000), seconds=st.floats(0, 100))
    def end(self, data: st.DataObject, tokens: int, seconds: float) -> None:
        placement = self.asker.open.pop(data.draw(st.integers(0, len(self.asker.open) - 1)))
        self.asker.router.finish(placement, tokens=tokens, seconds=seconds)

    @rule(url=st.sampled_from(["a", "b", "c", "unknown"]))
    def restart(self, url: str) -> None:
        self.asker.router.forget_replica(url)

    @rule(version=st.integers(0, 3))
    def retire(self, version: int) -> None:
        self.asker.router.forget_version(version)

    @invariant()
    def running_counts_are_exact(self) -> None:
        for url, backlog in self.asker.router.backlogs.items():
            assert backlog.running == sum(placement.url == url for placement in self.asker.open)

    @invariant()
    def work_is_what_is_open_and_what_is_reserved(self) -> None:
        router = self.asker.router
        for url, backlog in router.backlogs.items():
            reserved = sum(group.reserved for group in router._open if group.owner is backlog)
            charged = sum(placement.charge for placement in self.asker.open if placement.url == url)
            assert abs(backlog.tokens - charged - reserved) < 1e-3 * (1 + charged + reserved)

    def teardown(self) -> None:
        """When nothing is open and every group is complete, no work is left anywhere."""
        for placement in self.asker.open:
            self.asker.router.finish(placement)
        self.asker.open.clear()
        while self.asker.router._open:
            self.asker.router._close(self.asker.router._open.popleft())
        for backlog in self.asker.router.backlogs.values():
            assert backlog.running == 0
            assert abs(backlog.tokens) < 1.0


TestRouterStates = RouterMachine.TestCase
TestRouterStates.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
