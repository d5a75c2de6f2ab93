"""However often a run is cut and resumed, each prompt of an epoch is trained or dropped exactly once."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucket_grpo.trainer.lineage import Lineage, PromptOrder

starts = st.lists(
    st.tuples(st.integers(0, 25), st.sets(st.integers(0, 24)), st.sets(st.integers(0, 24))), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), starts)
def test_no_position_is_trained_twice_and_none_is_skipped(
    prompts: int, each: list[tuple[int, set[int], set[int]]]
) -> None:
    lineage = Lineage()
    for begun, unfinished, stale in each:
        order = PromptOrder(prompts, lineage)
        done = [group for group in range(begun) if group not in unfinished]
        lineage = lineage.extended(
            (order.position(g) for g in done if g not in stale),
            {order.position(g): "stale" for g in done if g in stale},
        )
    last = PromptOrder(prompts, lineage)
    remaining = {last.position(group) for group in range(4 * prompts)}
    assert not remaining & lineage.settled()
    assert set(range(max(remaining))) <= remaining | lineage.settled()


@given(st.integers(1, 9), starts)
def test_a_group_is_trained_on_the_row_that_its_position_names(
    prompts: int, each: list[tuple[int, set[int], set[int]]]
) -> None:
    lineage = Lineage()
    for begun, unfinished, _ in each:
        order = PromptOrder(prompts, lineage)
        lineage = lineage.extended((order.position(g) for g in range(begun) if g not in unfinished), {})
    order = PromptOrder(prompts, lineage)
    rows = [*order.first_rows(), *range(prompts), *range(prompts)]
    assert [order.position(group) % prompts for group in range(len(rows))] == rows


def test_it_survives_being_written_and_read(tmp_path: Path) -> None:
    lineage = Lineage().extended([0, 1, 2, 5], {3: "stale", 7: "stale"})
    lineage.write(tmp_path)
    assert Lineage.read(tmp_path) == lineage
    assert lineage.trained == [(0, 3), (5, 6)]
    assert lineage.summary() == {"trained": 4, "dropped": {"stale": 2}}


def test_training_a_position_twice_is_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="twice"):
        Lineage(trained=[(0, 4)]).extended([3], {})
