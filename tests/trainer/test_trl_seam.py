"""The seam rests on a few things in TRL 1.16; if TRL changes one of them, these tests say which."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

from bucket_grpo.trainer.trl_seam import BucketGRPOTrainer, DeferredBump, StallFreeClient, version_number


def calls_in_order(function: Any, *names: str) -> bool:
    source = inspect.getsource(function)
    places = [source.find(name) for name in names]
    return -1 not in places and places == sorted(places)


def test_trl_pauses_saves_loads_resumes_and_then_bumps() -> None:
    assert calls_in_order(
        AsyncGRPOTrainer._sync_weight_lora,
        "self.vllm_client.pause()",
        "save_lora_adapter(",
        "self.vllm_client.load_lora_adapter(",
        "self.vllm_client.resume()",
        "self.vllm_client.unload_lora_adapter(",
        "self.rollout_worker.update_model_version(self.model_version)",
    )


@pytest.mark.parametrize("method", ["pause", "resume", "load_lora_adapter", "unload_lora_adapter"])
def test_our_client_answers_the_calls_that_trl_makes_during_a_sync(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, method)) for cls in (StallFreeClient, VLLMClient))
    assert list(ours.parameters) == list(theirs.parameters)


def test_rollouts_ask_for_the_version_that_the_worker_was_told_last() -> None:
    assert "self.lora_name}-v{self.model_version}" in inspect.getsource(
        AsyncRolloutWorker._loop_cls._request_model.fget
    )
    assert list(inspect.signature(AsyncRolloutWorker.update_model_version).parameters) == ["self", "model_version"]


def test_the_first_sync_comes_before_the_first_rollout() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import _TrainBeginCallback

    assert calls_in_order(_TrainBeginCallback.on_train_begin, "_sync_weight()", "rollout_worker.start()")


def test_trl_syncs_through_the_method_that_we_extend() -> None:
    assert "StepIntervalCallback(self._sync_weight," in inspect.getsource(AsyncGRPOTrainer.__init__)
    assert BucketGRPOTrainer._sync_weight is not AsyncGRPOTrainer._sync_weight
    assert {"max_staleness", "weight_sync_steps", "token_budget"} <= set(AsyncGRPOConfig.__dataclass_fields__)


class RecordingPublisher:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def submit(self, number: int, step: int, folder: Path, canary: object) -> None:
        self.calls.append(("submit", number, step, folder))

    def wait_live(self, number: int, timeout: float) -> None:
        self.calls.append(("wait_live", number))

    def retire(self, number: int) -> None:
        self.calls.append(("retire", number))


def client(publisher: RecordingPublisher) -> StallFreeClient:
    return StallFreeClient(
        "http://127.0.0.1:1",  # nothing listens there: a call that went to the server would raise
        1.0,
        publisher=publisher,  # type: ignore[arg-type]
        canary=lambda: None,
        step=lambda: 8,
        first_version_timeout_s=5.0,
    )


def test_a_publish_stops_nothing_and_only_the_first_version_is_waited_for() -> None:
    publisher = RecordingPublisher()
    ours = client(publisher)
    for number in (1, 2):
        ours.pause()
        ours.load_lora_adapter(f"trl-policy-v{number}", "/tmp/adapter")
        ours.resume()
    ours.unload_lora_adapter("trl-policy-v1")
    folder = Path("/tmp/adapter")
    assert publisher.calls == [("submit", 1, 8, folder), ("wait_live", 1), ("submit", 2, 8, folder), ("retire", 1)]


def test_after_a_resume_the_first_version_of_the_incarnation_is_waited_for() -> None:
    publisher = RecordingPublisher()
    client(publisher).load_lora_adapter("trl-policy-v14", "/tmp/adapter")
    assert ("wait_live", 14) in publisher.calls


def test_rollouts_hear_of_a_version_when_it_is_live_not_when_trl_published_it() -> None:
    told: list[int] = []
    bump = DeferredBump(told.append)
    bump.accept(1)
    assert (told, bump.lag) == ([], 1)
    bump.went_live(1)
    bump.accept(2)
    bump.accept(3)
    assert (told, bump.lag) == ([1], 2)
    bump.went_live(3)
    bump.went_live(2)  # overtaken: a worker never goes back
    assert (told, bump.lag) == ([1, 3], 0)


@pytest.mark.parametrize("name", ["trl-policy", "v3x", "trl-policy-v"])
def test_a_name_without_a_version_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        version_number(name)


def test_killed_training_is_resumed_but_not_when_it_was_over_or_asked_to_stop(tmp_path: Path) -> None:
    from bucket_grpo.trainer.job import Outcome, TrainerJob
    from bucket_grpo.trainer.supervisor import Supervisor

    job = TrainerJob(
        run_file=tmp_path / "run.yaml", run="r", incarnation="20261130t154500z-a1b2c3", run_dir=tmp_path,
        bucket=str(tmp_path), replicas=["http://127.0.0.1:1"], max_training_restarts=1,
    )  # fmt: skip
    supervisor = Supervisor(job, tmp_path / "trainer.json")
    assert supervisor._may_resume(-9)
    assert not supervisor._may_resume(1)
    supervisor.asked_to_stop = True
    assert not supervisor._may_resume(-9)
    supervisor.asked_to_stop = False
    supervisor.training_restarts = 1
    assert not supervisor._may_resume(-9)
    supervisor.training_restarts = 0
    Outcome(exit_reason="finished").write(tmp_path)
    assert not supervisor._may_resume(-11)
