"""Whatever is sent to any route: never a 500, never a hang."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from fake_agent import BASE, FakeAgent
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_harness import INCARNATION, RUN, name, proxy_for, ref

from bucket_grpo.proxy.app import build_app
from bucket_grpo.proxy.config import ProxyConfig, Secrets

ANSWER_S = 5.0
FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A proxy with one replica and a live version, in a thread of its own."""
    started, stop, found = threading.Event(), threading.Event(), []

    async def run() -> None:
        async with proxy_for([FakeAgent("a")], tmp_path_factory.mktemp("proxy"), park_timeout_s=0.5) as proxy:
            await proxy.live(1)
            found.append(proxy.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(20)
    yield found[0]
    stop.set()
    thread.join(20)


def openapi() -> dict:
    """The app's own description, and the hot route's, which the framework never sees."""
    config = ProxyConfig(run=RUN, incarnation=INCARNATION, base_model=BASE, journal_dir=Path("/nonexistent"))
    app = build_app(config, Secrets())._app
    assert isinstance(app, FastAPI)
    schema = app.openapi()
    body = {
        "type": "object",
        "required": ["model", "prompt"],
        "properties": {
            "model": {"type": "string", "enum": [BASE, "trl-policy-v1", name(1), "trl-policy-v2", ""]},
            "prompt": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]},
            "max_tokens": {"type": "integer"},
            "seed": {"type": "integer"},
            "n": {"type": "integer"},
        },
    }
    content = {"application/json": {"schema": body}}
    responses = {"200": {"description": "vLLM's answer"}}
    schema["paths"]["/v1/completions"] = {
        "post": {"requestBody": {"required": True, "content": content}, "responses": responses}
    }
    # Would make the proxy look for made-up replicas; its own test has addresses that lead nowhere.
    del schema["paths"]["/replicas"]["put"]
    return schema


api = schemathesis.openapi.from_dict(openapi())


@api.parametrize()
@FEW
def test_every_route_answers_anything_without_a_500(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, timeout=ANSWER_S)
    assert response.status_code != 500, response.text


def ask(url: str, raw: bytes) -> httpx.Response:
    return httpx.post(url + "/v1/completions", content=raw, timeout=ANSWER_S)


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=4)
)
BODIES = st.fixed_dictionaries(
    {"model": st.sampled_from([BASE, "trl-policy-v1", "trl-policy-v0", "trl-policy-v99"]) | VALUES},
    optional=dict.fromkeys(("prompt", "max_tokens", "n", "seed", "stream", "logprobs", "stop"), VALUES),
)


@given(BODIES)
@FEW
def test_any_completion_body_is_answered_or_refused(url: str, body: dict) -> None:
    response = ask(url, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert response.status_code in (200, 400, 404), response.text


@given(st.binary(max_size=200))
@FEW
def test_any_bytes_are_refused(url: str, raw: bytes) -> None:
    assert ask(url, raw).status_code == 400


@given(st.lists(st.text(max_size=10), max_size=3))
@FEW
def test_any_replica_list_is_refused_or_taken(url: str, urls: list[str]) -> None:
    urls = [text for text in urls if not text.startswith("http")]
    response = httpx.put(url + "/replicas", json={"urls": urls or ["ftp://nowhere"]}, timeout=ANSWER_S)
    assert response.status_code == 400


def test_after_all_this_it_still_answers(url: str) -> None:
    body = {"model": "trl-policy-v1", "prompt": [1, 2, 3], "max_tokens": 4}
    assert ask(url, json.dumps(body).encode()).status_code == 200
    status = httpx.get(url + "/status", timeout=ANSWER_S).json()
    assert (status["in_flight"], status["parked"]) == (0, 0)
    assert httpx.post(url + "/versions", json=ref(1).model_dump(), timeout=ANSWER_S).status_code == 202
