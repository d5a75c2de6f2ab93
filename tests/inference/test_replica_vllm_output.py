"""What vLLM says (its metrics, errors and dying words) is read for what it means. Excerpts are vLLM 0.31's own."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from bucket_grpo.bucket_sync.current import Current
from bucket_grpo.inference.log_cause import cause_of_death
from bucket_grpo.inference.run_watch import why_ended
from bucket_grpo.inference.supervisor import ProgressWatch
from bucket_grpo.inference.vllm_client import error_text, parse_load

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting{engine="0",model_name="base"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="base"} 700.0
vllm:prefix_cache_queries_created{engine="0",model_name="base"} 1.796e+09
vllm:prefix_cache_hits_total{engine="0",model_name="base"} 512.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="base"} 9.0
vllm:generation_tokens_total{engine="0",model_name="base"} 1.2345e+04
vllm:generation_tokens_created{engine="0",model_name="base"} 1.796e+09
"""


def test_load_figures_are_read_and_their_look_alikes_left_alone() -> None:
    load = parse_load(METRICS)
    assert load.model_dump() == {
        "running": 3,
        "waiting": 1,
        "generated_tokens_total": 12345,
        "kv_cache_usage": 0.25,
        "prefix_cache_hits_total": 512,
        "prefix_cache_queries_total": 700,
    }


def test_several_engines_are_summed_up() -> None:
    load = parse_load(METRICS + METRICS.replace('engine="0"', 'engine="1"'))
    assert (load.running, load.generated_tokens_total, load.kv_cache_usage) == (6, 24690, 0.25)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"No adapter found for /x","code":404}}', "No adapter found for /x"),
        (b"Internal Server Error", "Internal Server Error"),
        (b'{"detail":"Not Found"}', '{"detail":"Not Found"}'),
    ],
)
def test_vllms_error_bodies(body: bytes, message: str) -> None:
    assert error_text(body) == message


DEATHS = {
    "an unknown flag": (
        2,
        "usage: api_server.py [-h]\napi_server.py: error: unrecognized arguments: --no-such-flag\n",
        "unrecognized arguments: --no-such-flag",
        True,
    ),
    "a model that is not there": (
        1,
        "Traceback (most recent call last):\n"
        '  File "huggingface_hub/utils/_validators.py", line 133, in validate_repo_id\n'
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
        "'/nowhere'.\n",
        "Repo id must be in the form",
        True,
    ),
    "a context that is too long": (
        1,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (999999) is greater than the derived max_model_len (1024)\n"
        "    For further information visit https://errors.pydantic.dev\n",
        "max_model_len (999999) is greater than",
        True,
    ),
    "a cause in the engine's process, echoed by the server's": (
        1,
        "(EngineCore pid=7) ERROR 11-30 16:01:02 [core.py:1200] EngineCore failed to start.\n"
        "(EngineCore pid=7) ERROR 11-30 16:01:02 [core.py:1200] Traceback (most recent call last):\n"
        "(EngineCore pid=7) ERROR 11-30 16:01:02 [core.py:1200] ValueError: No available memory for the cache blocks.\n"
        "(APIServer pid=6) Traceback (most recent call last):\n"
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n",
        "ValueError: No available memory for the cache blocks.",
        False,
    ),
    "an engine process that was killed": (
        0,
        "(APIServer pid=6) WARNING 11-30 16:23:29 [core_client.py:809] [shutdown] MPClient: engine core exited "
        "unexpectedly; starting cleanup\n"
        "(APIServer pid=6) ERROR 11-30 16:23:29 [async_llm.py:871] vllm.v1.engine.exceptions.EngineDeadError: "
        "EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
        "nanobind: leaked 4 instances!\n",
        "EngineCore process ended without a word: it was killed",
        False,
    ),
    "a port that is taken": (1, "OSError: [Errno 98] Address already in use\n", "Address already in use", False),
    "a server that was killed": (137, "INFO:     Application startup complete.\n", "killed by SIGKILL", False),
    "a guard that was killed": (-9, "INFO:     Application startup complete.\n", "killed by SIGKILL", False),
    "no log at all": (3, None, "ended with status 3 without a word", False),
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_cause_of_death_is_named(tmp_path: Path, death: str) -> None:
    status, text, words, permanent = DEATHS[death]
    log = tmp_path / "vllm.log"
    if text is not None:
        log.write_text(text)
    cause = cause_of_death(status, log)
    assert words in cause.text
    assert "\n" not in cause.text
    assert str(log) in cause.text
    assert cause.permanent is permanent


def test_no_token_for_long_enough_while_requests_wait_is_a_stall() -> None:
    watch = ProgressWatch(limit_s=15, last_sign_at=0)
    assert not watch.observe(1, tokens=10, in_flight=2)
    assert not watch.observe(10, tokens=10, in_flight=2)
    assert watch.observe(16, tokens=10, in_flight=2)


def test_a_token_or_an_empty_engine_is_a_sign_of_life() -> None:
    watch = ProgressWatch(limit_s=15, last_sign_at=0)
    assert not watch.observe(14, tokens=1, in_flight=2)
    assert not watch.observe(28, tokens=1, in_flight=0)
    assert not watch.observe(42, tokens=1, in_flight=5)


def test_an_engine_that_does_not_answer_is_stalled_even_when_idle() -> None:
    watch = ProgressWatch(limit_s=15, last_sign_at=0)
    assert not watch.observe(14, tokens=None, in_flight=0)
    assert watch.observe(15, tokens=None, in_flight=0)


NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def current(state: str = "running", silent_s: float = 0.0) -> Current:
    beat = NOW - timedelta(seconds=silent_s)
    return Current(run="r", incarnation="i", state=state, started_at=beat, heartbeat_at=beat)


EARLIER = NOW - timedelta(hours=1)


def test_a_replica_goes_on_while_its_run_lives() -> None:
    assert why_ended(current(silent_s=59), 60, EARLIER, NOW) is None


def test_a_replica_ends_with_its_run() -> None:
    assert "finished" in (why_ended(current("finished"), 60, EARLIER, NOW) or "")
    assert "failed" in (why_ended(current("failed"), 60, EARLIER, NOW) or "")
    assert "61 s ago" in (why_ended(current(silent_s=61), 60, EARLIER, NOW) or "")


def test_a_replica_waits_for_a_trainer_that_starts_later() -> None:
    just_now = NOW - timedelta(seconds=59)
    before = current("finished", silent_s=3600)
    for unclaimed in (None, before):
        assert why_ended(unclaimed, 60, just_now, NOW) is None
        assert "no trainer" in (why_ended(unclaimed, 60, NOW - timedelta(seconds=61), NOW) or "")
