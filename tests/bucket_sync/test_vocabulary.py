import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.bucket_sync.vocabulary import (
    NEXT_STATES,
    VersionRef,
    VersionState,
    check_incarnation,
    check_run_name,
    mint_incarnation,
    parse_served_name,
    parse_version_key,
)

BORN = "20261130t154500z-a1b2c3"
RUNS = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True)


@given(run=RUNS, number=st.integers(1, 10**9))
def test_names_and_keys_say_exactly_which_version(run, number):
    ref = VersionRef(run=run, incarnation=mint_incarnation(), number=number, sha256="0" * 64, size=1, step=0)
    assert parse_version_key(ref.key) == parse_served_name(ref.name) == (run, ref.incarnation, number)


@given(st.lists(st.tuples(RUNS, st.sampled_from([BORN, "20261130t154501z-a1b2c3"]), st.integers(1, 30))))
def test_no_two_versions_share_a_name_or_a_key(versions):
    refs = [VersionRef(run=r, incarnation=i, number=n, sha256="0" * 64, size=1, step=0) for r, i, n in set(versions)]
    assert len({ref.name for ref in refs}) == len({ref.key for ref in refs}) == len(refs)


@pytest.mark.parametrize("name", ["", "v1", "run-v1", f"run-{BORN}-v01", f"run-{BORN}-v1x", f"../x-{BORN}-v1"])
def test_what_is_no_served_name_is_refused(name):
    with pytest.raises(ValueError):
        parse_served_name(name)


@pytest.mark.parametrize(
    "key",
    [
        f"run/{BORN}/v1.safetensors",
        "run/x/v000001.safetensors",
        f"../{BORN}/v000001.safetensors",
        f"a/run/{BORN}/v000001.safetensors",
        f"run/{BORN}/v000001.safetensors/",
        f"run/{BORN}/v000000.safetensors",
        f"run/{BORN}/v0000001.safetensors",
    ],
)
def test_what_is_no_versions_key_is_refused(key):
    with pytest.raises(ValueError):
        parse_version_key(key)


@pytest.mark.parametrize("run", ["", ".", "..", "-a", "a-", "A", "a/b", "a..b", "a" * 64, "a b", "ä"])
def test_run_names_are_strict(run):
    with pytest.raises(ValueError):
        check_run_name(run)


def test_incarnations_sort_by_time_and_are_strict():
    assert sorted(["20261130t154500z-ffffff", "20261130t154501z-000000"])[0] == "20261130t154500z-ffffff"
    with pytest.raises(ValueError):
        check_incarnation("20261130t154500z-a1b2c3/..")


def test_every_state_has_its_moves_and_failed_comes_from_the_first_four_only():
    assert set(NEXT_STATES) == set(VersionState)
    to_failed = {state for state, moves in NEXT_STATES.items() if VersionState.FAILED in moves}
    assert to_failed == {VersionState.WANTED, VersionState.STAGING, VersionState.STAGED, VersionState.LOADED}
