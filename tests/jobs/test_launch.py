"""Launching against the emulated Hub: nothing is started twice, and nothing of half a run is left."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bucket_grpo.bucket_sync.current import read_current
from bucket_grpo.bucket_sync.hub_store import HubStore
from bucket_grpo.jobs import launch as launch_module
from bucket_grpo.jobs.actions import Found, cancel, resume, scale, start_again
from bucket_grpo.jobs.hub import JobsHub
from bucket_grpo.jobs.labels import name_of
from bucket_grpo.jobs.launch import Launch, LaunchFailed, secrets_for
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.travel import PLAN_FILE
from tests.jobs.emulated import Cluster, cluster, eventually, running_with
from tests.jobs.plans import make_plan

LAUNCHER = Path(__file__).with_name("launcher_process.py")


@dataclass(frozen=True)
class ScriptPlan(Plan):
    """A plan whose jobs run small scripts instead of vLLM and TRL; `mark` shows in their command lines."""

    mark: str = ""
    trainer_script: str = "sleep 60"
    replica_script: str = "sleep 60"

    def _command(self, role: str, part: str) -> list[str]:
        script = self.trainer_script if role == "trainer" else self.replica_script
        return ["bash", "-c", f"{script}; : {part} {self.mark}"]


def script_plan(**scripts: str) -> ScriptPlan:
    run = f"r{uuid.uuid4().hex[:8]}"
    plan = make_plan(run_name=run)
    return ScriptPlan(plan.needs, plan.incarnation, "me", "0.1.0", 2, mark=uuid.uuid4().hex, **scripts)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hub")) as running:
        running.api.create_bucket("me/rl")
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "POLL_S", 0.1)


def make_launch(hub: Cluster, plan: Plan) -> Launch:
    ours = JobsHub("me", token=hub.hub.token, endpoint=hub.hub.endpoint)
    store = HubStore("me/rl", token=hub.hub.token, endpoint=hub.hub.endpoint)
    return Launch(ours, store, plan, secrets_for(plan, hub.hub.token, {}), say=lambda _line: None)


def packed(plan: Plan) -> dict[str, bytes]:
    return {f"{plan.launch_folder}{PLAN_FILE}": plan.dump()}


def parts(launch: Launch) -> list[str]:
    return sorted(name.part for job in launch.hub.active(run=launch.plan.run) if (name := name_of(job)))


def test_a_run_is_started_waited_for_and_all_of_it_ended(hub: Cluster) -> None:
    plan = script_plan(trainer_script="sleep 1")
    launch = make_launch(hub, plan)
    launch.start(packed(plan))
    launch.wait_running()
    assert launch.wait() == 0
    assert eventually(lambda: not running_with(plan.mark))
    assert eventually(lambda: parts(launch) == [])
    current = read_current(launch.store, plan.run)
    assert current is not None
    assert current.state != "running"


def test_the_exit_status_says_that_the_trainer_failed(hub: Cluster) -> None:
    launch = make_launch(hub, script_plan(trainer_script="sleep 0.5; exit 3"))
    launch.start({})
    assert launch.wait() == 1
    assert eventually(lambda: parts(launch) == [])


def test_lost_answers_start_nothing_twice(hub: Cluster) -> None:
    launch = make_launch(hub, script_plan())
    hub.hub.add_fault(kind="lose_answer", method="POST", path="/api/jobs/me", times=2)
    launch.start({})
    assert parts(launch) == ["trainer", "vllm-0", "vllm-1"]
    assert len(launch.hub.jobs(run=launch.plan.run)) == 3
    launch.cancel()


def test_a_launch_that_fails_half_way_leaves_nothing(hub: Cluster) -> None:
    plan = script_plan()
    broken = replace(
        plan,
        needs=plan.needs.model_copy(
            update={
                "jobs": plan.needs.jobs.model_copy(
                    update={"trainer": plan.needs.jobs.trainer.model_copy(update={"flavor": "h900"})}
                )
            }
        ),
    )
    launch = make_launch(hub, broken)
    with pytest.raises(Exception, match="h900"):
        launch.start({})
    assert eventually(lambda: parts(launch) == [])
    assert eventually(lambda: not running_with(plan.mark))


def test_a_job_that_cannot_start_ends_the_launch_with_its_last_words(hub: Cluster) -> None:
    launch = make_launch(hub, script_plan(replica_script="echo no such model >&2; exit 2"))
    launch.start({})
    assert eventually(lambda: parts(launch) == ["trainer"])
    with pytest.raises(LaunchFailed, match=r"vllm-\d.*exit code: 2.*no such model"):
        launch.wait_running()
    assert eventually(lambda: parts(launch) == [])


def test_a_trainer_without_a_machine_ends_the_launch_and_a_lone_replica_is_given_up(hub: Cluster) -> None:
    def impatient(plan: ScriptPlan) -> ScriptPlan:
        jobs = plan.needs.jobs.model_copy(update={"schedule_timeout": "5s"})
        return replace(plan, needs=plan.needs.model_copy(update={"jobs": jobs}))

    hub.faults(schedule_forever=1, match="trainer")
    launch = make_launch(hub, impatient(script_plan()))
    launch.start({})
    with pytest.raises(LaunchFailed, match="trainer got no machine within 5 s"):
        launch.wait_running()
    assert eventually(lambda: parts(launch) == [])

    hub.faults(schedule_forever=1, match="vllm-1")
    launch = make_launch(hub, impatient(script_plan()))
    launch.start({})
    launch.wait_running()
    assert eventually(lambda: parts(launch) == ["trainer", "vllm-0"])
    launch.cancel()


def test_a_run_that_is_running_is_not_started_again(hub: Cluster) -> None:
    plan = script_plan()
    launch = make_launch(hub, plan)
    launch.start({})
    with pytest.raises(LaunchFailed, match="running already"):
        make_launch(hub, replace(plan, incarnation=make_plan().incarnation)).start({})
    assert parts(launch) == ["trainer", "vllm-0", "vllm-1"]
    launch.cancel()


def test_a_run_grows_and_shrinks_and_is_cancelled_from_anywhere(hub: Cluster) -> None:
    plan = script_plan()
    launch = make_launch(hub, plan)
    launch.start(packed(plan))
    found = Found(launch.hub, launch.store, plan)
    scale(found, 3, lambda _line: None)
    assert parts(launch) == ["trainer", "vllm-0", "vllm-1", "vllm-2"]
    assert Plan.load(launch.store.read(f"{plan.launch_folder}{PLAN_FILE}")).replicas == 3
    scale(found, 1, lambda _line: None)
    assert eventually(lambda: parts(launch) == ["trainer", "vllm-0"])
    assert sorted(cancel(found)) == ["trainer", "vllm-0"]
    assert eventually(lambda: parts(launch) == [])


def test_resume_replaces_what_runs_with_a_new_incarnation(hub: Cluster) -> None:
    plan = script_plan()
    launch = make_launch(hub, plan)
    launch.start({**packed(plan), f"{plan.launch_folder}run.yaml": b"run_name: x"})
    new, status = resume(Found(launch.hub, launch.store, plan), wait="posted", say=lambda _line: None)
    assert status == 0
    assert new.incarnation > plan.incarnation
    assert new.resumes == plan.incarnation
    assert launch.store.read(f"{new.launch_folder}run.yaml") == b"run_name: x"
    assert {job.labels["incarnation"] for job in launch.hub.active(run=plan.run)} == {new.incarnation}
    cancel(Found(launch.hub, launch.store, new))


def test_a_plan_can_be_started_anew_but_not_beside_itself(hub: Cluster) -> None:
    plan = script_plan(trainer_script="sleep 1")
    launch = make_launch(hub, plan)
    launch.start(packed(plan))
    found = Found(launch.hub, launch.store, plan)
    with pytest.raises(LaunchFailed, match="running already"):
        start_again(found, wait="posted", say=lambda _line: None)
    launch.wait()
    assert eventually(lambda: parts(launch) == [])
    new, _ = start_again(found, wait="posted", say=lambda _line: None)
    assert (new.incarnation > plan.incarnation, new.resumes) == (True, None)
    cancel(Found(launch.hub, launch.store, new))


def start_launcher(hub: Cluster, plan: ScriptPlan, folder: Path) -> subprocess.Popen[str]:
    """A launcher in a process of its own, as `launch --wait` is."""
    state = {"mark": plan.mark, "run": plan.run, "incarnation": plan.incarnation}
    command = [sys.executable, str(LAUNCHER), json.dumps(state)]
    env = hub.hub.environment(folder) | {"PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.e2e
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_asked_to_stop_ends_its_jobs(hub: Cluster, tmp_path: Path, signum: signal.Signals) -> None:
    plan = script_plan()
    launcher = start_launcher(hub, plan, tmp_path)
    assert launcher.stdout is not None
    assert launcher.stdout.readline().strip() == "running"
    launcher.send_signal(signum)
    assert launcher.wait(20) != 0
    assert eventually(lambda: parts(make_launch(hub, plan)) == [])
    assert eventually(lambda: not running_with(plan.mark))


@pytest.mark.e2e
def test_a_launcher_that_is_killed_leaves_nothing_running_after_the_bound(hub: Cluster, tmp_path: Path) -> None:
    """Killed at ten moments from before the first post to after the last; the bound is the jobs' own time-out."""
    plans = []
    for moment in range(10):
        plan = script_plan()
        plan = replace(plan, needs=plan.needs.model_copy(update={"jobs": _with_timeout(plan, "6s")}))
        launcher = start_launcher(hub, plan, tmp_path)
        time.sleep(1.0 + 0.25 * moment)
        launcher.kill()
        launcher.wait(10)
        plans.append(plan)
    started = sum(bool(make_launch(hub, plan).hub.jobs(run=plan.run)) for plan in plans)
    assert started >= 3, "too few launchers came far enough to post a job: this test showed nothing"
    assert eventually(lambda: not any(running_with(plan.mark) for plan in plans), timeout_s=20)
    assert eventually(lambda: not any(parts(make_launch(hub, plan)) for plan in plans))


def _with_timeout(plan: Plan, timeout: str) -> object:
    jobs = plan.needs.jobs
    return jobs.model_copy(
        update={
            "trainer": jobs.trainer.model_copy(update={"timeout": timeout}),
            "vllm": jobs.vllm.model_copy(update={"timeout": timeout}),
        }
    )
