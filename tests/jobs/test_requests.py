"""What is asked of the Hub, field by field: against the released client, the documented shapes, and a golden file."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bucket_grpo.jobs.actions import LaunchFlags, plan_launch, show_launch
from bucket_grpo.jobs.hub import JobsHub
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.trainer.run_file import RunFile
from tests.jobs.plans import make_plan
from tests.jobs.recording import ScriptedHub, client_talks_to

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "sanity-run5.json"
RECIPE = REPOSITORY / "recipes" / "sanity-run5.yaml"
SECRETS = {"HF_TOKEN": "hf_x", "BUCKET_GRPO_TOKEN": "hf_x"}


@pytest.mark.parametrize("network", ["exposed", "private"])
def test_what_dry_run_shows_is_what_the_released_client_posts(network: str) -> None:
    """Only the secrets' values differ, and `portsPublic`, which clients from 2.x on add as an empty list."""
    jobs = make_plan().needs.jobs.model_copy(update={"network": network})
    plan = make_plan(jobs=jobs)
    hub = ScriptedHub()
    with client_talks_to(hub.answer):
        for request in plan.requests():
            JobsHub("me", token="hf_x").post(request, SECRETS)
    posted = hub.bodies()
    for body in posted:
        body["secrets"] = dict.fromkeys(body["secrets"], "********")
        assert body.get("expose", {}).pop("portsPublic", []) == []
    assert posted == [request.shown()["body"] for request in plan.requests()]
    assert {request.url.path for request in hub.requests if request.method == "POST"} == {"/api/jobs/me"}


def test_a_schedule_starts_a_small_job_that_starts_the_plan() -> None:
    plan, bodies = make_plan(), []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/scheduled-jobs/me":
            bodies.append(json.loads(request.content))
        owner = {"id": "u", "name": "me", "type": "user"}
        return httpx.Response(200, json={"id": "s1", "owner": owner, "jobSpec": {}, "status": {}}, request=request)

    with client_talks_to(answer):
        assert JobsHub("me", token="hf_x").schedule(plan.launcher(), SECRETS, "@daily") == "s1"
    (body,) = bodies
    assert (body["schedule"], body["concurrency"]) == ("@daily", False)
    spec = body["jobSpec"]
    assert spec.pop("secrets") == {"HF_TOKEN": "hf_x"}
    shown = plan.launcher().shown()["body"]
    shown.pop("secrets")
    assert spec == shown
    assert spec["flavor"] == "cpu-basic"
    assert spec["volumes"][0]["readOnly"]


def test_every_job_has_a_timeout_labels_and_its_token_as_a_secret() -> None:
    for request in make_plan().requests():
        body = request.shown()["body"]
        assert body["timeoutSeconds"] == 60
        assert {"app", "run", "role", "incarnation", "part", "name"} <= body["labels"].keys()
        assert "HF_TOKEN" in body["secrets"]
        assert not any("TOKEN" in name for name in body["environment"])


def test_replicas_read_the_bucket_and_are_exposed_and_the_trainer_writes_it_and_is_not() -> None:
    *replicas, trainer = [request.shown()["body"] for request in make_plan().requests()]
    assert [body["labels"]["part"] for body in replicas] == ["vllm-0", "vllm-1"]
    assert all(body["volumes"][0]["readOnly"] and body["expose"] == {"ports": [8000]} for body in replicas)
    assert trainer["volumes"] == [{"type": "bucket", "source": "me/rl", "mountPath": "/lora", "readOnly": False}]
    assert "expose" not in trainer


def test_in_a_private_network_nothing_is_exposed_and_replicas_have_names() -> None:
    plan = make_plan(jobs=make_plan().needs.jobs.model_copy(update={"network": "private"}))
    *replicas, trainer = [request.shown()["body"] for request in plan.requests()]
    groups = {body["network"]["group"] for body in [*replicas, trainer]}
    assert len(groups) == 1
    assert re.fullmatch(r"[a-z0-9-]{1,46}", groups.pop())
    assert [body["network"]["aliases"] for body in replicas] == [["vllm-0"], ["vllm-1"]]
    assert not any("expose" in body for body in replicas)


def test_a_secret_without_a_value_is_named_before_anything_is_posted(plan: Plan) -> None:
    request = replace(plan.trainer(), secret_names=("HF_TOKEN", "JUDGE_KEY"))
    hub = ScriptedHub()
    with client_talks_to(hub.answer), pytest.raises(ValueError, match="JUDGE_KEY"):
        JobsHub("me", token="hf_x").post(request, SECRETS)
    assert hub.requests == []


def test_a_run_name_that_cannot_be_a_label_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be a job's label"):
        make_plan(run_name="a.b")


def test_vllm_flags_reach_the_agent_and_ours_are_refused_before_anything_is_posted() -> None:
    run = RunFile.load(RECIPE)
    plan, _, _ = plan_launch(run, LaunchFlags(), RECIPE.parent, "me")
    spec = plan.agent_spec("vllm-0", Path("/lora"), 8000, Path("/tmp"), gpu=True)
    assert (spec["max_model_len"], spec["device"], spec["bucket"], spec["port"]) == (4096, "cuda", "/lora", 8000)
    jobs = run.jobs.model_copy(update={"vllm": run.jobs.vllm.model_copy(update={"args": {"enable-lora": False}})})
    with pytest.raises(ValueError, match=r"jobs\.vllm.*--enable-lora is set by bucket-grpo"):
        plan_launch(run.model_copy(update={"jobs": jobs}), LaunchFlags(), RECIPE.parent, "me")


def test_the_plan_survives_the_bucket(plan: Plan) -> None:
    assert Plan.load(plan.dump()) == plan


def test_the_reference_recipe_gives_the_golden_requests() -> None:
    """To accept a change: `python -m tests.jobs.test_requests`, and read the diff."""
    assert _masked() == json.loads(GOLDEN.read_text())


def test_dry_run_is_quick_light_and_tells_the_price() -> None:
    """Without torch, TRL, vLLM or a web framework, without a token, and without asking anybody."""
    code = (
        "import sys\n"
        "from bucket_grpo.cli import jobs_verbs\n"
        "import typer\n"
        "app = typer.Typer(); jobs_verbs.register(app)\n"
        "try: app()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "heavy = {'torch', 'trl', 'vllm', 'fastapi', 'transformers', 'peft', 'starlette'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", code, "launch", str(RECIPE), "--dry-run", "--json"]
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "HF_ENDPOINT": "http://127.0.0.1:1"}
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=30)
    took_s = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert len(shown["requests"]) == 4
    assert shown["cost_usd_per_hour"] == pytest.approx(25, abs=0.1)
    assert shown["cost_usd"] == pytest.approx(22, abs=0.5)
    assert "53 min" in shown["cost_source"]
    assert took_s < 6, "2 s on a quiet machine; this bound only catches a heavy import"


def _masked() -> dict[str, object]:
    """The dry run of the recipe, with what differs from run to run replaced."""
    shown = show_launch(RunFile.load(RECIPE), LaunchFlags(), RECIPE.parent)
    text = json.dumps(shown).replace(shown["incarnation"], "INCARNATION")
    return json.loads(re.sub(r"(bucket-grpo\[\w+\]==)[\d.]+", r"\1VERSION", text))


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(_masked(), indent=1) + "\n")
