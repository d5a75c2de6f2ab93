"""What to do next with each version on a replica. Pure: `decide` compares what is wanted with what is there.

Level-triggered: it never matters how the present state came about, so a lost message, a repeated one and a restart of
the engine are all the same case.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bucket_grpo.bucket_sync.vocabulary import NEXT_STATES, VersionRef, VersionState

S = VersionState


class Do(StrEnum):
    """ADD: make a record; STAGE: bucket → local disk; LOAD: local disk → vLLM; PROVE: probe and canary; RETIRE: take no
    new requests for it; UNLOAD: take it out of vLLM; DROP: forget what never was, or is no longer, in vLLM."""

    ADD = "add"
    STAGE = "stage"
    LOAD = "load"
    PROVE = "prove"
    RETIRE = "retire"
    UNLOAD = "unload"
    DROP = "drop"


IN_ENGINE = frozenset({Do.LOAD, Do.PROVE, Do.UNLOAD})


@dataclass(frozen=True)
class Held:
    """What `decide` needs to know of one version: its state, and how many completions it is serving now."""

    ref: VersionRef
    state: VersionState
    in_flight: int = 0


class IllegalMove(AssertionError):
    """A bug in this program: a version was about to make a move that no version may make."""


def check_move(name: str, old: VersionState, new: VersionState) -> None:
    if new not in NEXT_STATES[old]:
        raise IllegalMove(f"{name}: {old} → {new}")


def decide(
    wanted: Mapping[str, VersionRef], have: Mapping[str, Held], *, engine_ready: bool
) -> list[tuple[Do, VersionRef]]:
    """The next step for each version that has one, newest version first (it is the one that the trainer waits for)."""
    steps = []
    for name, ref in wanted.items():
        held = have.get(name)
        do = Do.ADD if held is None or held.state is S.UNLOADED else _towards_ready(held, engine_ready)
        if do:
            steps.append((do, ref))
    for name, held in have.items():
        if name not in wanted:
            do = _towards_unloaded(held, engine_ready)
            if do:
                steps.append((do, held.ref))
    return sorted(steps, key=lambda step: (step[1].incarnation, step[1].number), reverse=True)


def _towards_ready(held: Held, engine_ready: bool) -> Do | None:
    if held.state is S.WANTED:
        return Do.STAGE
    if held.state is S.RETIRING:  # wanted again: it goes out first, then it is added anew
        return _towards_unloaded(held, engine_ready)
    if engine_ready:
        return {S.STAGED: Do.LOAD, S.LOADED: Do.PROVE}.get(held.state)
    return None


def _towards_unloaded(held: Held, engine_ready: bool) -> Do | None:
    if held.state in (S.WANTED, S.STAGED, S.FAILED):
        return Do.DROP
    if held.state in (S.LOADED, S.READY):
        return Do.RETIRE
    if held.state is S.RETIRING and held.in_flight == 0 and engine_ready:
        return Do.UNLOAD
    return None  # UNLOADED already, or STAGING: its end is waited for


def after_engine_loss(state: VersionState) -> VersionState:
    """Where a version stands once the engine is gone: its files are still on local disk."""
    return S.STAGED if state in (S.LOADED, S.READY, S.RETIRING) else state
