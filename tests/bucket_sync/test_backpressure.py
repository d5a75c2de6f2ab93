import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.bucket_sync.backpressure import BackPressure

EVENTS = st.lists(st.sampled_from(["submit", "start", "live"]), max_size=200)


@given(max_staleness=st.integers(0, 8), first=st.integers(1, 500), events=EVENTS)
def test_whatever_happens_the_lag_is_bounded_and_live_only_grows(max_staleness, first, events):
    pressure = BackPressure(max_staleness)
    number, started, live = first, [], []
    for event in events:
        if event == "submit" and pressure.may_accept(number):
            overtaken = pressure.accept(number)
            assert overtaken is None or overtaken not in started
            number += 1
        elif event == "start" and (begun := pressure.start()):
            started.append(begun)
        elif event == "live" and pressure.publishing is not None:
            live.append(pressure.publishing)
            pressure.went_live(pressure.publishing)
        assert 0 <= pressure.lag <= pressure.max_lag
        assert pressure.lag_max <= max(1, max_staleness - 1)
    assert live == sorted(set(live))
    assert set(live) <= set(started)
    assert len(started) + pressure.skipped + (pressure.waiting is not None) == number - first


@given(max_staleness=st.integers(0, 8), first=st.integers(1, 500), events=EVENTS)
def test_a_publish_that_waits_always_has_one_under_way_to_wait_for(max_staleness, first, events):
    """No deadlock: if nothing may be accepted, finishing what is under way lets it be accepted."""
    pressure = BackPressure(max_staleness)
    number = first
    for event in events:
        if event == "submit":
            while not pressure.may_accept(number):
                begun = pressure.publishing or pressure.start()
                assert begun is not None
                pressure.went_live(begun)
            pressure.accept(number)
            number += 1
        elif event == "start":
            pressure.start()
        elif pressure.publishing is not None:
            pressure.went_live(pressure.publishing)


def test_of_the_versions_that_wait_only_the_newest_is_published():
    pressure = BackPressure(max_staleness=4)
    assert pressure.accept(1) is None
    assert pressure.start() == 1
    assert pressure.accept(2) is None
    assert pressure.accept(3) == 2
    assert not pressure.may_accept(4)
    pressure.went_live(1)
    assert pressure.may_accept(4)
    assert pressure.start() == 3
    assert (pressure.skipped, pressure.lag, pressure.lag_max) == (1, 2, 3)


def test_a_number_is_never_accepted_twice():
    pressure = BackPressure(max_staleness=4)
    pressure.accept(14)
    for number in (13, 14):
        with pytest.raises(ValueError, match="not newer"):
            pressure.accept(number)


def test_one_version_is_published_at_a_time():
    pressure = BackPressure(max_staleness=4)
    pressure.accept(1)
    assert pressure.start() == 1
    pressure.accept(2)
    assert pressure.start() is None
    with pytest.raises(ValueError, match="is being published"):
        pressure.went_live(2)
