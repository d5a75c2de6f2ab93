"""Whole runs as jobs on the emulated Hub: real vLLM, real TRL, a mounted bucket in each job. Minutes."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket_grpo.runtime.guard import descendants
from tests.jobs.emulated import NAMESPACES, Cluster, cluster, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-addition.yaml"
BUCKET = "hf://buckets/me/rl"
RUN = "tiny-addition"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not NAMESPACES:
        pytest.skip("network namespaces need root")
    with cluster(tmp_path_factory.mktemp("hub")) as running:
        yield running


class Shell:
    """`bucket-grpo` with this Hub's token."""

    def __init__(self, hub: Cluster, home: Path) -> None:
        self.env = hub.hub.environment(home)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bucket_grpo.cli.main", *arguments]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def __call__(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def launch(self, *more: str, flavor: str = "cpu-basic") -> subprocess.Popen[str]:
        on = ["--trainer-flavor", flavor, "--vllm-flavor", flavor, "--bucket", BUCKET, "--timeout", "9m"]
        return self.start("launch", str(RECIPE), "--wait", "--json", *on, *more)

    def said(self) -> dict[str, Any]:
        done = self("inspect", RUN, "--json")
        return (json.loads(done.stdout)["said"] or {}) if done.returncode == 0 else {}

    def wait_for_step(self, step: int, launcher: subprocess.Popen[str], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not (said := self.said()) or said["state"] != "running" or (said.get("step") or 0) < step:
            assert launcher.poll() is None, (launcher.communicate(), "the launch ended early")
            assert time.monotonic() < deadline, f"step {step} was not reached in {timeout_s} s"
            time.sleep(2)

    def results(self, folder: Path) -> dict[str, Any]:
        assert self("fetch", RUN, "--folder", str(folder)).returncode == 0
        outcome: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
        return outcome


@pytest.fixture
def shell(hub: Cluster, tmp_path: Path) -> Shell:
    return Shell(hub, tmp_path)


def nothing_runs(hub: Cluster) -> bool:
    active = list(hub.api.list_jobs(status=["SCHEDULING", "RUNNING"], namespace="me"))
    return not active and not descendants(hub.hub.process.pid)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_run_is_launched_followed_reported_and_ended(
    hub: Cluster, shell: Shell, tmp_path: Path, replicas: int
) -> None:
    launcher = shell.launch("--steps", "30", "--replicas", str(replicas))
    launcher.communicate(timeout=500)
    assert launcher.returncode == 0
    outcome = shell.results(tmp_path / "results")
    assert (outcome["exit_reason"], outcome["steps"]) == ("finished", 30)
    report = shell("report", str(tmp_path / "results"), "--json")
    assert report.returncode == 0, report.stderr
    figures = json.loads(report.stdout.splitlines()[-1])
    assert figures["steps"] == 30
    assert shell("cancel", RUN).returncode == 0
    assert eventually(lambda: nothing_runs(hub))


def test_a_lost_replica_is_replaced_and_the_run_finishes(hub: Cluster, shell: Shell, tmp_path: Path) -> None:
    launcher = shell.launch("--steps", "40", "--replicas", "2")
    shell.wait_for_step(5, launcher)
    (lost,) = hub.api.list_jobs(labels={"run": RUN, "part": "vllm-1"}, status="RUNNING", namespace="me")
    hub.lose(lost)
    launcher.communicate(timeout=400)
    assert launcher.returncode == 0
    outcome = shell.results(tmp_path / "results")
    assert (outcome["exit_reason"], outcome["steps"]) == ("finished", 40)
    parts = [job.labels["part"] for job in hub.api.list_jobs(labels={"run": RUN}, namespace="me") if job.labels]
    assert parts.count("vllm-1") == 2
    assert eventually(lambda: nothing_runs(hub))


def test_a_spent_budget_ends_the_run_with_a_checkpoint_and_a_resume_goes_on(
    hub: Cluster, shell: Shell, tmp_path: Path
) -> None:
    """At emulated prices: three jobs on l4x1 cost $2.42 an hour."""
    launcher = shell.launch("--steps", "4000", "--replicas", "2", "--max-usd", "0.12", flavor="l4x1")
    launcher.communicate(timeout=400)
    assert launcher.returncode == 1
    outcome = shell.results(tmp_path / "first")
    assert outcome["exit_reason"] == "budget"
    assert "max_usd" in outcome["error"]
    assert shell.said()["usd"] <= 0.12
    keys = [entry.path for entry in hub.api.list_bucket_tree("me/rl", prefix=f"{RUN}/checkpoints/", recursive=True)]
    assert f"{RUN}/checkpoints/latest.json" in keys
    first = outcome["steps"]
    assert eventually(lambda: nothing_runs(hub))

    resumed = shell.start("resume", RUN, "--max-usd", "1")
    assert resumed.wait(120) == 0
    deadline = time.monotonic() + 300
    while (shell.said().get("step") or 0) <= first and time.monotonic() < deadline:
        time.sleep(2)
    step = shell.said().get("step") or 0
    shell("cancel", RUN)
    assert step > first
    assert eventually(lambda: nothing_runs(hub))
