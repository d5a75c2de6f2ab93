"""The fleet's rules one by one, with a clock that only moves when told."""

import pytest
from fake_agent import BASE
from proxy_harness import INCARNATION, RUN, name, ref

from bucket_grpo.bucket_sync.vocabulary import VersionState
from bucket_grpo.bucket_sync.wire import AgentStatus, Load, VersionStatus
from bucket_grpo.proxy.fleet import Fleet
from bucket_grpo.proxy.fleet_state import Refusal, Target, Unknown, VersionConflict

READY, FAILED, STAGING = VersionState.READY, VersionState.FAILED, VersionState.STAGING


class Scene:
    """A fleet of replicas `a`, `b`, … whose agents say what the test says."""

    def __init__(self, replicas: str) -> None:
        self.now = 0.0
        self.fleet = Fleet(
            RUN, INCARNATION, BASE, lambda: self.now, dtype="float32", live_grace_s=5, fail_grace_s=60, stall_after_s=30
        )
        self.fleet.set_replicas(replicas)
        self.seq = 0
        for replica in replicas:
            self.says(replica)

    def says(
        self,
        replica: str,
        *,
        engine: str = "ready",
        epoch: int = 1,
        tokens: int = 0,
        dtype: str = "float32",
        **states: VersionState,
    ) -> None:
        """`v1=READY` and so on; the reason of a failure is `out of memory`."""
        self.seq += 1
        versions = {
            name(int(key[1:])): VersionStatus(state=state, reason="out of memory" if state is FAILED else None)
            for key, state in states.items()
        }
        status = AgentStatus(
            seq=self.seq,
            replica=replica,
            boot_id="1",
            engine_epoch=epoch,
            engine=engine,  # type: ignore[arg-type]
            base_model=BASE,
            dtype=dtype,
            versions=versions,
            load=Load(generated_tokens_total=tokens),
        )
        self.fleet.observe(replica, status)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.settle()

    def state(self, number: int) -> str:
        liveness = self.fleet.liveness(number)
        assert liveness is not None
        return liveness.state


def test_live_at_once_when_ready_everywhere() -> None:
    scene = Scene("ab")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    assert scene.state(1) == "pending"
    scene.says("b", v1=READY)
    assert (scene.state(1), scene.fleet.live, scene.fleet.lag) == ("live", 1, 0)


def test_live_five_seconds_after_the_first_replica_is_ready() -> None:
    scene = Scene("ab")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    scene.later(4.9)
    assert scene.state(1) == "pending"
    scene.later(0.2)
    assert scene.state(1) == "live"
    assert scene.fleet.ready_on(1) == ("a",), "b still gets nothing of it"


def test_a_replica_that_is_not_running_does_not_delay_a_version() -> None:
    scene = Scene("ab")
    scene.says("b", engine="starting")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    assert scene.state(1) == "live"


def test_failed_on_every_replica_is_failed_with_each_reason() -> None:
    scene = Scene("ab")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=FAILED)
    assert scene.state(1) == "pending"
    scene.says("b", v1=FAILED)
    liveness = scene.fleet.liveness(1)
    assert liveness is not None
    assert liveness.state == "failed"
    assert liveness.failed_on == {"a": "out of memory", "b": "out of memory"}
    assert scene.fleet.resolve("trl-policy-v1") == Refusal(
        503, "version 1 failed on every replica: a: out of memory; b: out of memory"
    )


def test_a_starting_replica_may_still_save_a_version_for_a_minute() -> None:
    scene = Scene("ab")
    scene.says("b", engine="starting")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=FAILED)
    scene.later(59)
    assert scene.state(1) == "pending"
    scene.later(2)
    assert scene.state(1) == "failed"


def test_who_fails_what_others_load_is_quarantined_until_it_no_longer_does() -> None:
    scene = Scene("ab")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    scene.says("b", v1=FAILED)
    assert scene.fleet.ready_on(None) == ("a",)
    assert "quarantined" in str(scene.fleet.replicas["b"].reason)
    assert scene.state(1) == "live"
    scene.says("b", v1=READY, epoch=2)
    assert scene.fleet.ready_on(1) == ("a", "b")


def test_no_token_with_requests_in_flight_takes_a_replica_out_until_it_moves() -> None:
    scene = Scene("ab")
    scene.says("a", tokens=10)
    scene.fleet.begin("a")
    scene.later(31)
    assert scene.fleet.ready_on(None) == ("b",)
    assert [event.kind for event in scene.fleet.take_events()] == ["down"]
    scene.says("a", tokens=11)
    assert scene.fleet.ready_on(None) == ("a", "b")


def test_a_stalled_replica_without_requests_is_tried_again_after_a_minute() -> None:
    scene = Scene("ab")
    scene.says("a", tokens=10)
    replica = scene.fleet.begin("a")
    scene.later(31)
    scene.fleet.end(replica, progressed=False)
    scene.later(59)
    assert scene.fleet.ready_on(None) == ("b",)
    scene.later(2)
    assert scene.fleet.ready_on(None) == ("a", "b")


def test_an_idle_replica_is_not_stalled() -> None:
    scene = Scene("a")
    scene.says("a", tokens=10)
    scene.later(1000)
    assert scene.fleet.ready_on(None) == ("a",)
    scene.fleet.begin("a")
    scene.later(29)
    assert scene.fleet.ready_on(None) == ("a",)


def test_an_engine_restart_takes_its_versions_away_and_is_told() -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    scene.fleet.take_events()
    scene.says("a", epoch=2, v1=VersionState.STAGED)
    assert scene.fleet.ready_on(1) == ()
    assert [event.kind for event in scene.fleet.take_events()] == ["restarted"]
    assert scene.state(1) == "live", "live stays live: requests wait for it"


def test_another_dtype_is_never_routed_to() -> None:
    scene = Scene("ab")
    scene.says("b", dtype="bfloat16")
    assert scene.fleet.ready_on(None) == ("a",)
    assert scene.fleet.replicas["b"].reason == "it computes in bfloat16, this run needs float32"


def test_a_replica_that_denies_a_version_is_believed_until_its_next_word() -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    scene.fleet.disprove("a", name(1))
    assert scene.fleet.ready_on(1) == ()
    scene.says("a", v1=READY)
    assert scene.fleet.ready_on(1) == ("a",)


def test_a_version_in_use_or_without_successor_does_not_retire() -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(1))
    scene.says("a", v1=READY)
    scene.fleet.hold(1)
    scene.fleet.unload(1)
    assert scene.state(1) == "live"
    scene.fleet.accept(ref(2))
    scene.says("a", v1=READY, v2=READY)
    assert scene.state(1) == "live", "a request still uses it"
    scene.fleet.release(1)
    assert scene.state(1) == "retired"
    assert [version.number for version in scene.fleet.wanted()] == [2]


def test_late_names_are_answered_by_the_newest_live_version() -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(5))
    scene.says("a", v5=READY)
    assert scene.fleet.resolve("trl-policy-v3") == Target(5, name(5), late=True)
    assert scene.fleet.resolve("trl-policy-v6") == Refusal(
        404, "version 6 was never published; the newest accepted one is 5"
    )


@pytest.mark.parametrize(
    "model",
    [
        "",
        "tinyy",
        "trl-policy",
        "trl-policy-v",
        "trl-policy-v0",
        "trl-policy-v01",
        "trl-policy-v1 ",
        "other-v1",
        "TINY",
    ],
)
def test_only_versions_of_this_run_and_the_base_by_name_are_served(model: str) -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(1))
    outcome = scene.fleet.resolve(model)
    assert isinstance(outcome, Refusal)
    assert outcome.status == 404


def test_just_started_it_waits_to_hear_of_a_version_before_denying_it() -> None:
    scene = Scene("a")
    scene.fleet.rebuilding = True
    assert isinstance(scene.fleet.resolve("trl-policy-v7"), Unknown)
    scene.fleet.rebuilding = False
    assert isinstance(scene.fleet.resolve("trl-policy-v7"), Refusal)


def test_what_agents_hold_and_nobody_announced_is_noticed() -> None:
    scene = Scene("a")
    scene.says("a", v7=READY, v6=VersionState.UNLOADED)
    assert scene.fleet.strangers() == {7}


def test_the_same_number_with_other_content_is_refused() -> None:
    scene = Scene("a")
    scene.fleet.accept(ref(1))
    assert scene.fleet.accept(ref(1)).ref == ref(1)
    with pytest.raises(VersionConflict, match="announced before"):
        scene.fleet.accept(ref(1, content="other"))
    with pytest.raises(VersionConflict, match="this proxy serves"):
        scene.fleet.accept(ref(2).model_copy(update={"run": "another"}))


def test_two_replicas_that_each_fail_what_the_other_loads_are_not_both_lost() -> None:
    scene = Scene("ab")
    for number in (1, 2):
        scene.fleet.accept(ref(number))
    scene.says("a", v1=FAILED, v2=READY)
    scene.says("b", v1=READY, v2=FAILED)
    scene.later(10)
    assert (scene.fleet.ready_on(1), scene.fleet.ready_on(2)) == (("b",), ("a",))
    assert scene.fleet.live == 2
