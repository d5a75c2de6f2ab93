"""What a replica promises to the proxy, and to whoever else reaches its port. The agent is real, vLLM is not."""

import json
import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
from replicas import BASE, PROMPT, Bucket, Replica, write_adapter


def calls(script: Path, path: str) -> list[dict]:
    lines = (script / "calls.jsonl").read_text().splitlines()
    return [call for call in map(json.loads, lines) if call["path"] == path]


def test_a_wanted_version_becomes_ready_and_is_served_under_its_own_name(
    replica: Replica, bucket: Bucket, script: Path
) -> None:
    ref = bucket.publish(1)
    replica.want(ref)
    ready = replica.wait_state(ref, "READY")
    assert set(ready["seconds"]) == {"staging", "load", "canary"}
    answer = replica.complete(ref.name)
    assert answer.status_code == 200
    assert answer.json()["model"] == ref.name
    assert calls(script, "/v1/completions")[-1]["model"] == ref.name


def test_a_version_without_a_canary_is_ready_after_the_probe(replica: Replica, bucket: Bucket, script: Path) -> None:
    ref = bucket.publish_adapter(write_adapter(bucket.root.parent / "adapter"), 1, canary=None)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    assert {call["lora_name"] for call in calls(script, "/v1/load_lora_adapter")} == {ref.name, "bucket-grpo-probe"}


def test_the_base_is_served_under_its_name(idle_replica: Replica) -> None:
    assert idle_replica.complete(BASE).json()["model"] == BASE


def test_a_completion_without_a_model_is_refused_and_never_answered_by_the_base(idle_replica: Replica) -> None:
    for body in ({}, {"model": None}, {"model": ""}, {"model": 3}, []):
        assert idle_replica.client.post("/v1/completions", json=body).status_code == 400


def test_a_version_that_is_not_ready_is_not_found(replica: Replica, bucket: Bucket, script: Path) -> None:
    (script / "refuse_load").write_text("the adapter is broken")
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "FAILED")
    answer = replica.complete(ref.name)
    assert answer.status_code == 404
    assert "FAILED" in answer.json()["error"]["message"]
    assert replica.complete("somebody-else-v1").status_code == 404


def test_vllms_other_routes_cannot_be_reached(idle_replica: Replica) -> None:
    for method, path in (
        ("POST", "/pause"),
        ("POST", "/collective_rpc"),
        ("POST", "/adapters"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/invocations"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ):
        assert idle_replica.client.request(method, path, json={}).status_code == 404, path


def test_what_the_proxy_reads_from_vllm_passes_through(idle_replica: Replica) -> None:
    assert idle_replica.client.get("/v1/models").json()["data"][0]["max_model_len"] == 1024
    assert "lora_config" in idle_replica.client.get("/server_info?config_format=json").json()["vllm_config"]
    assert "vllm:generation_tokens_total" in idle_replica.client.get("/metrics").text


def test_with_a_token_only_health_is_open(start) -> None:
    with start(token="secret") as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        stranger = httpx.Client(base_url=replica.client.base_url)
        assert stranger.get("/health").status_code == 200
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert stranger.get("/agent/status", headers=wrong).status_code == 401
            assert stranger.get("/v1/models", headers=wrong).status_code == 401
            assert stranger.put("/agent/wanted", json={"versions": []}, headers=wrong).status_code == 401
            body = {"model": BASE, "prompt": PROMPT, "max_tokens": 1}
            assert stranger.post("/v1/completions", json=body, headers=wrong).status_code == 401


def test_the_token_is_not_handed_on_to_vllm(start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUCKET_GRPO_TOKEN", "secret")
    with start(token="secret") as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        pid = (tmp_path / "script" / "pid").read_text()
        assert b"BUCKET_GRPO_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_status_answers_at_once_when_something_changed_and_else_after_the_wait(
    replica: Replica, bucket: Bucket
) -> None:
    seq = replica.wait_for(lambda s: s["engine"] == "ready")["seq"]
    started = time.monotonic()
    assert replica.status(after=seq, wait=0.6)["seq"] == seq
    assert 0.5 < time.monotonic() - started < 2.0

    ref = bucket.publish(1)
    threading.Timer(0.3, replica.want, [ref]).start()
    started = time.monotonic()
    assert replica.status(after=seq, wait=30)["seq"] > seq
    assert time.monotonic() - started < 5.0


def test_a_reader_of_an_earlier_agents_status_is_answered_at_once_by_the_next(start, tmp_path: Path) -> None:
    with start() as replica:
        seq = replica.wait_for(lambda s: s["engine"] == "ready")["seq"]
    shutil.rmtree(tmp_path / "logs")
    with start() as replica:
        started = time.monotonic()
        replica.status(after=seq, wait=30)
        assert time.monotonic() - started < 5.0


def test_a_version_retires_only_when_its_last_request_is_done(replica: Replica, bucket: Bucket, script: Path) -> None:
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    answers: list[httpx.Response] = []
    request = threading.Thread(target=lambda: answers.append(replica.complete(ref.name, seconds=1.5)))
    request.start()
    time.sleep(0.4)
    replica.want()
    replica.wait_state(ref, "RETIRING")
    assert replica.complete(ref.name).status_code == 200, "a request on its way is still answered"
    request.join()
    assert answers[0].status_code == 200
    replica.wait_state(ref, "UNLOADED")
    assert calls(script, "/v1/unload_lora_adapter")[-1]["lora_name"] == ref.name
    assert replica.complete(ref.name).status_code == 404


def test_a_version_that_is_wanted_again_comes_back(replica: Replica, bucket: Bucket) -> None:
    ref = bucket.publish(1)
    for _ in range(2):
        replica.want(ref)
        replica.wait_state(ref, "READY")
        replica.want()
        replica.wait_state(ref, "UNLOADED")


def test_files_of_a_version_stay_for_as_long_as_vllm_may_read_them(
    replica: Replica, bucket: Bucket, tmp_path: Path
) -> None:
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    folder = tmp_path / "staging" / ref.name
    assert folder.is_dir()
    replica.want()
    replica.wait_state(ref, "UNLOADED")
    assert not folder.exists()


def test_a_stop_lets_requests_in_flight_finish_and_takes_no_new_ones(start) -> None:
    with start(drain_grace_s=10) as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        answers: list[httpx.Response] = []
        request = threading.Thread(target=lambda: answers.append(replica.complete(BASE, seconds=2.0)))
        request.start()
        time.sleep(0.5)
        replica.terminate()
        replica.wait_for(lambda s: s["engine"] == "stopping", 5)
        late = replica.complete(BASE)
        assert (late.status_code, late.json()["error"]["type"]) == (503, "draining")
        assert replica.ended() == 0
        request.join()
        assert answers[0].status_code == 200


def test_a_stop_leaves_no_vllm_behind(start, script: Path) -> None:
    with start() as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        pid = int((script / "pid").read_text())
        replica.terminate()
        assert replica.ended() == 0
    assert not Path(f"/proc/{pid}").exists()


def test_a_client_that_hangs_up_is_not_counted_as_in_flight(start, bucket: Bucket) -> None:
    with start() as replica:
        ref = bucket.publish(1)
        replica.want(ref)
        replica.wait_state(ref, "READY")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{replica.client.base_url}/v1/completions",
                json={"model": ref.name, "prompt": PROMPT, "max_tokens": 1, "seconds": 20},
                timeout=0.5,
            )
        replica.want()
        replica.wait_state(ref, "UNLOADED", timeout_s=5)
