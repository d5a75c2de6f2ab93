"""The command line against the emulated Hub: every mistake is one line, and nothing is left running."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.jobs.emulated import Cluster, cluster, eventually
from tests.jobs.test_launch import make_launch, packed, parts, script_plan

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "recipes" / "tiny-addition.yaml"
ON_CPU = ["--trainer-flavor", "cpu-basic", "--vllm-flavor", "cpu-basic"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hub")) as running:
        running.api.create_bucket("me/rl")
        yield running


@pytest.fixture
def cli(hub: Cluster, tmp_path: Path) -> "CommandLine":
    return CommandLine(hub, tmp_path)


class CommandLine:
    def __init__(self, hub: Cluster, home: Path) -> None:
        self.hub = hub
        self.env = hub.hub.environment(home) | {"COLUMNS": "200"}

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bucket_grpo.cli.main", *arguments]
        kept = {name: value for name, value in (self.env | env).items() if value}
        return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)

    def refused(self, *arguments: str, **env: str) -> str:
        """The one line of a refusal; nothing runs afterwards."""
        done = self(*arguments, **env)
        assert done.returncode == 1, done.stdout + done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert line.startswith("bucket-grpo: ")
        assert "Traceback" not in done.stderr
        assert eventually(lambda: not list(self.hub.api.list_jobs(status=["SCHEDULING", "RUNNING"], namespace="me")))
        return line


def changed_recipe(folder: Path, **changes: object) -> str:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(RECIPE.read_text()) | changes))
    return str(path)


def test_no_token(cli: CommandLine) -> None:
    assert "hf auth login" in cli.refused("launch", str(RECIPE), *ON_CPU, HF_TOKEN="")


def test_a_token_that_is_not_valid(cli: CommandLine) -> None:
    assert "not valid" in cli.refused("launch", str(RECIPE), *ON_CPU, HF_TOKEN="hf_wrong")


def test_a_read_only_token(cli: CommandLine) -> None:
    assert "role 'write'" in cli.refused("launch", str(RECIPE), *ON_CPU, HF_TOKEN=cli.hub.hub.read_token)


def test_an_unknown_flavor_is_refused_with_the_list(cli: CommandLine) -> None:
    line = cli.refused("launch", str(RECIPE), "--trainer-flavor", "h900", "--vllm-flavor", "cpu-basic")
    assert "h900" in line
    assert "h200x8" in line


def test_somebody_elses_bucket(cli: CommandLine) -> None:
    line = cli.refused("launch", str(RECIPE), *ON_CPU, "--bucket", "hf://buckets/other/rl")
    assert "other" in line


def test_a_bucket_url_that_is_none(cli: CommandLine) -> None:
    assert "hf://buckets/" in cli.refused("launch", str(RECIPE), *ON_CPU, "--bucket", "me/rl")


def test_a_missing_reward_file(cli: CommandLine, tmp_path: Path) -> None:
    recipe = changed_recipe(tmp_path, reward_funcs=["./gone.py:f"])
    assert "gone.py" in cli.refused("launch", recipe, *ON_CPU)


def test_a_secret_that_is_not_set(cli: CommandLine, tmp_path: Path) -> None:
    recipe = changed_recipe(tmp_path, jobs={"trainer": {"secrets": ["JUDGE_KEY"]}})
    assert "export JUDGE_KEY" in cli.refused("launch", recipe, *ON_CPU)


@pytest.mark.e2e
def test_a_hub_that_does_not_answer(cli: CommandLine) -> None:
    line = cli.refused("ps", "--namespace", "me", HF_ENDPOINT="http://127.0.0.1:9")
    assert "does not answer" in line


def test_a_run_that_nobody_started(cli: CommandLine) -> None:
    assert "knows no job of run 'nothing'" in cli.refused("inspect", "nothing")


@pytest.mark.e2e
def test_any_machine_with_a_token_sees_the_run_and_ends_it(cli: CommandLine) -> None:
    plan = script_plan(trainer_script="echo training; sleep 60")
    launch = make_launch(cli.hub, plan)
    launch.start(packed(plan))
    launch.wait_running()
    rows = json.loads(cli("ps", plan.run, "--json").stdout)
    assert {row["part"]: row["stage"] for row in rows} == dict.fromkeys(["vllm-0", "vllm-1", "trainer"], "RUNNING")
    status = json.loads(cli("inspect", plan.run, "--json").stdout)
    assert status["active"]
    assert status["said"] is None
    assert "training" in cli("logs", plan.run, "--role", "trainer", "--tail", "3").stdout
    assert cli("cancel", plan.run).returncode == 0
    assert eventually(lambda: parts(launch) == [])
    assert cli("wait", plan.run).returncode == 1


def test_preflight_tries_everything_and_leaves_nothing(cli: CommandLine) -> None:
    done = cli("preflight", "--bucket", "hf://buckets/me/rl", "--json")
    results = json.loads(done.stdout.splitlines()[-1])
    assert {result["name"]: result["ok"] for result in results} == {result["name"]: True for result in results}
    assert len(results) == 8
    assert done.returncode == 0
    assert not [entry for entry in cli.hub.api.list_bucket_tree("me/rl", recursive=True) if "preflight" in entry.path]


def test_preflight_says_what_a_read_token_lacks(cli: CommandLine) -> None:
    done = cli("preflight", "--bucket", "hf://buckets/me/rl", "--json", HF_TOKEN=cli.hub.hub.read_token)
    assert done.returncode == 1
    failed = [result for result in json.loads(done.stdout.splitlines()[-1]) if not result["ok"]]
    assert failed
    assert "write" in failed[0]["found"] + (failed[0]["fix"] or "")
