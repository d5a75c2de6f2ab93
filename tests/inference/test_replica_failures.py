"""Whatever goes wrong with vLLM or a version is noticed, named, and healed where it can be. vLLM is a scripted fake."""

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from replicas import BASE, PROMPT, Bucket, Replica

from bucket_grpo.bucket_sync.version_file import Canary


def test_a_crash_is_reported_with_its_cause_and_healed(replica: Replica, bucket: Bucket, script: Path) -> None:
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    (script / "die_on_completion").touch()
    answer = replica.complete(ref.name)
    (script / "die_on_completion").unlink()
    assert answer.status_code == 503
    dead = replica.wait_for(lambda s: s["engine"] == "dead" or s["engine_epoch"] == 2)
    if dead["engine"] == "dead":
        assert "CPU Generator does not use offset" in dead["reason"]
    healed = replica.wait_for(lambda s: s["engine"] == "ready" and s["engine_epoch"] == 2)
    assert healed["engine_restarts"] == 1
    replica.wait_state(ref, "READY")
    assert replica.complete(ref.name).status_code == 200


def test_a_killed_vllm_is_named_as_killed(replica: Replica, script: Path) -> None:
    seq = replica.wait_for(lambda s: s["engine"] == "ready")["seq"]
    reasons: list[str] = []

    def collect() -> None:
        status = {"seq": seq, "engine": "ready"}
        while status["engine"] != "dead":
            status = replica.status(after=status["seq"], wait=10)
        reasons.append(status["reason"])

    watcher = threading.Thread(target=collect)
    watcher.start()
    os.kill(int((script / "pid").read_text()), signal.SIGKILL)
    watcher.join(10)
    assert "killed by SIGKILL" in reasons[0]


def test_requests_to_a_dead_engine_get_its_cause_and_not_connection_refused(replica: Replica, script: Path) -> None:
    replica.wait_for(lambda s: s["engine"] == "ready")
    (script / "die_at_start").write_text("RuntimeError: no memory left")
    os.kill(int((script / "pid").read_text()), signal.SIGKILL)
    replica.wait_for(lambda s: s["engine"] != "ready")
    error = replica.complete(BASE).json()["error"]
    assert error["type"].startswith("engine_")
    assert "refused" not in error["message"]


def test_half_an_answer_cannot_be_taken_for_a_whole_one(replica: Replica, script: Path) -> None:
    replica.wait_for(lambda s: s["engine"] == "ready")
    (script / "die_in_the_middle_of_an_answer").touch()
    with pytest.raises(httpx.RemoteProtocolError):
        replica.complete(BASE)


def test_gives_up_with_the_cause_after_the_last_allowed_death(start, script: Path) -> None:
    (script / "die_at_start").write_text("RuntimeError: no memory left on the device")
    with start(max_engine_deaths=2) as replica:
        failed = replica.wait_for(lambda s: s["engine"] == "failed")
        assert failed["engine_epoch"] == 2
        assert "vLLM died 2 times in a row" in failed["reason"]
        assert "no memory left on the device" in failed["reason"]
        assert replica.ended() == 4


def test_gives_up_at_once_where_another_start_would_end_the_same(start, script: Path) -> None:
    (script / "die_at_start").write_text("api_server.py: error: unrecognized arguments: --no-such-flag")
    with start(extra_args={"no-such-flag": 1}) as replica:
        failed = replica.wait_for(lambda s: s["engine"] == "failed")
        assert failed["engine_epoch"] == 1
        assert "unrecognized arguments: --no-such-flag" in failed["reason"]
        assert replica.ended() == 4


def test_a_vllm_that_runs_otherwise_than_asked_is_refused_by_flag(start, script: Path) -> None:
    (script / "dtype").write_text("torch.bfloat16")
    with start() as replica:
        failed = replica.wait_for(lambda s: s["engine"] == "failed")
        assert "--dtype bfloat16, this replica needs float32" in failed["reason"]
        assert replica.ended() == 4


def test_a_stalled_engine_is_restarted_although_its_health_is_fine(start, bucket: Bucket, script: Path) -> None:
    with start(stall_after_s=2.0) as replica:
        ref = bucket.publish(1)
        replica.want(ref)
        replica.wait_state(ref, "READY")
        (script / "stall").touch()
        answers: list[httpx.Response] = []
        hanging = threading.Thread(target=lambda: answers.append(replica.complete(ref.name)))
        hanging.start()
        stalled = replica.wait_for(lambda s: s["engine"] == "stalled", timeout_s=8)
        assert "no token was generated for 2 s with 1 request(s) in flight" in stalled["reason"]
        hanging.join(10)
        (script / "stall").unlink()
        assert answers[0].status_code == 503
        replica.wait_for(lambda s: s["engine_epoch"] == 2 and s["engine"] == "ready")
        replica.wait_state(ref, "READY")


def test_an_idle_engine_is_not_taken_for_a_stalled_one(start) -> None:
    with start(stall_after_s=1.0) as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        time.sleep(3.0)
        status = replica.status()
        assert (status["engine"], status["engine_epoch"]) == ("ready", 1)


def test_a_refused_load_is_tried_again_and_counted(replica: Replica, bucket: Bucket, script: Path) -> None:
    (script / "refuse_load_once").write_text("Loading lora failed: a passing reason")
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    status = replica.status()
    assert status["load_retries"] >= 1
    assert status["load_failures"] == 0


@pytest.mark.parametrize("lateness", ["answer_load_late_once", "load_late_once"])
def test_a_load_that_answers_too_late_is_looked_up_and_not_given_up(
    start, bucket: Bucket, script: Path, monkeypatch: pytest.MonkeyPatch, lateness: str
) -> None:
    monkeypatch.setattr("bucket_grpo.inference.vllm_client.LOAD_TIMEOUT_S", 0.3)
    with start() as replica:
        replica.wait_for(lambda s: s["engine"] == "ready")
        (script / lateness).write_text("yes")
        ref = bucket.publish(1)
        replica.want(ref)
        replica.wait_state(ref, "READY")
        assert replica.complete(ref.name).status_code == 200
        status = replica.status()
        assert (status["loads"], status["load_failures"]) == (1, 0)


def test_a_load_refused_for_good_fails_with_vllms_own_words(replica: Replica, bucket: Bucket, script: Path) -> None:
    (script / "refuse_load").write_text("Loading lora failed: size mismatch for q_proj")
    ref = bucket.publish(1)
    replica.want(ref)
    failed = replica.wait_state(ref, "FAILED")
    assert "size mismatch for q_proj" in failed["reason"]
    assert replica.status()["load_failures"] == 1


def test_a_refused_unload_is_tried_again(replica: Replica, bucket: Bucket, script: Path) -> None:
    ref = bucket.publish(1)
    replica.want(ref)
    replica.wait_state(ref, "READY")
    (script / "refuse_unload_once").write_text("yes")
    replica.want()
    replica.wait_state(ref, "UNLOADED")
    assert not (script / "refuse_unload_once").exists()


def test_a_stop_does_not_wait_for_a_restart_that_is_due(start, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucket_grpo.inference.supervisor.FIRST_BACKOFF_S", 25.0)
    (script / "die_at_start").write_text("RuntimeError: no memory left")
    with start() as replica:
        replica.wait_for(lambda s: s["engine"] == "dead")
        started = time.monotonic()
        replica.terminate()
        assert replica.ended() == 0
        assert time.monotonic() - started < 10.0


def test_a_base_served_under_a_versions_name_is_found_out(replica: Replica, bucket: Bucket, script: Path) -> None:
    (script / "serve_base").touch()
    ref = bucket.publish(1)
    replica.want(ref)
    assert "LoRA has no effect" in replica.wait_state(ref, "FAILED")["reason"]
    assert replica.complete(ref.name).status_code == 404


def test_another_versions_weights_under_a_name_are_found_out(replica: Replica, bucket: Bucket) -> None:
    good = bucket.publish(1)
    replica.want(good)
    replica.wait_state(good, "READY")
    wrong = Canary(prompt=PROMPT, logprobs=[-0.5] * (len(PROMPT) - 1))
    bad = bucket.publish(2, canary=wrong)
    replica.want(good, bad)
    reason = replica.wait_state(bad, "FAILED")["reason"]
    assert reason.startswith("canary: logprobs differ")
    assert "expected -0.5000" in reason
    assert replica.status()["versions"][good.name]["state"] == "READY"


def test_a_version_that_kills_the_engine_is_given_up_and_the_others_go_on(start, bucket: Bucket, script: Path) -> None:
    with start(max_engine_deaths=5) as replica:
        good, poison = bucket.publish(1), bucket.publish(2)
        (script / "die_on_load").write_text(poison.name)
        replica.want(good, poison)
        reason = replica.wait_state(poison, "FAILED", timeout_s=40)["reason"]
        assert "vLLM died or hung 2 times while it was loaded or proved" in reason
        replica.wait_state(good, "READY")
        assert replica.complete(good.name).status_code == 200


def test_a_damaged_file_never_reaches_vllm(replica: Replica, bucket: Bucket, script: Path) -> None:
    ref = bucket.publish(1)
    data = bytearray((bucket.root / ref.key).read_bytes())
    data[-1] ^= 1
    same_size = ref.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
    bucket.put(same_size, bytes(data))
    replica.want(same_size)
    assert "digest" in replica.wait_state(same_size, "FAILED")["reason"]
    assert replica.status()["rejected"] == {"wrong_digest": 1}
    assert not (script / "calls.jsonl").exists()


def test_a_version_of_another_base_never_reaches_vllm(start, bucket: Bucket, script: Path) -> None:
    with start(served_model_name="another-base") as replica:
        ref = bucket.publish(1)
        replica.want(ref)
        assert "belongs to base 'base'" in replica.wait_state(ref, "FAILED")["reason"]
        assert replica.status()["rejected"] == {"wrong_base": 1}
        assert not (script / "calls.jsonl").exists()
