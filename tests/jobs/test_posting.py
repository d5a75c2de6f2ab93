"""A job is posted once: lost answers are looked up, refusals are retried or told, doubles are ended."""

import httpx
import pytest

from bucket_grpo.jobs.hub import HubProblem, JobsHub
from bucket_grpo.jobs.plan import Plan
from tests.jobs.recording import ScriptedHub, client_talks_to

SECRETS = {"HF_TOKEN": "hf_x", "BUCKET_GRPO_TOKEN": "hf_x"}


def post(hub: ScriptedHub, plan: Plan) -> str:
    with client_talks_to(hub.answer):
        return JobsHub("me", token="hf_x", pause=lambda _s: None).post(plan.replica(0), SECRETS).id


def test_a_lost_answer_starts_no_second_job(plan: Plan) -> None:
    hub = ScriptedHub(faults=["lost"])
    assert post(hub, plan) == hub.jobs[0]["id"]
    assert len(hub.jobs) == 1


def test_a_lost_answer_is_looked_for_also_where_listings_lag(plan: Plan) -> None:
    hub = ScriptedHub(faults=["lost"], lists_lag=2)
    assert post(hub, plan) == hub.jobs[0]["id"]
    assert len(hub.jobs) == 1


def test_a_post_that_never_arrived_is_posted_again(plan: Plan) -> None:
    hub = ScriptedHub(faults=[httpx.ReadTimeout("gone"), 503])
    post(hub, plan)
    assert len(hub.jobs) == 1
    assert len(hub.bodies()) == 3


def test_too_many_requests_are_retried_without_a_lookup(plan: Plan) -> None:
    hub = ScriptedHub(faults=[429, 429])
    post(hub, plan)
    assert [request.method for request in hub.requests] == ["POST"] * 3


@pytest.mark.parametrize(
    ("status", "says"), [(401, "hf auth login"), (402, "billing"), (403, "role 'write'"), (400, "refused")]
)
def test_a_refusal_is_one_line_with_what_to_do(plan: Plan, status: int, says: str) -> None:
    hub = ScriptedHub(faults=[status])
    with pytest.raises(HubProblem, match=says) as caught:
        post(hub, plan)
    assert "\n" not in str(caught.value)
    assert "vllm-0" in str(caught.value)
    assert hub.jobs == []


def test_retries_end(plan: Plan) -> None:
    hub = ScriptedHub(faults=[503] * 50)
    with pytest.raises(HubProblem, match="503"):
        post(hub, plan)
    assert len(hub.bodies()) == 5


def test_doubles_are_ended_and_the_oldest_stays(plan: Plan) -> None:
    hub = ScriptedHub()
    with client_talks_to(hub.answer):
        ours = JobsHub("me", token="hf_x", pause=lambda _s: None)
        for _ in range(3):
            ours.post(plan.replica(0), SECRETS)
        other = ours.post(plan.replica(1), SECRETS)
        ended = ours.cancel_doubles(run=plan.run)
    assert ended == [job["id"] for job in hub.jobs[1:3]] == hub.cancelled
    assert other.id not in ended


def test_without_a_token_one_line_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(HubProblem, match="hf auth login"):
        JobsHub("me")
