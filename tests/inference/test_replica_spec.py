"""One typed spec gives vLLM's command line and environment; what it must not be told otherwise is refused."""

import json
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from bucket_grpo.inference.spec import ReplicaSpec, command_line, environment, loras_for
from bucket_grpo.inference.spec_check import mismatches

FIELDS = {
    "replica": "r0",
    "port": 8000,
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "served_model_name": "Qwen/Qwen2.5-Math-1.5B",
    "dtype": "bfloat16",
    "device": "cuda",
    "run": "demo",
    "bucket": "/lora",
    "staging_dir": "/tmp/staging",
    "log_dir": "/tmp/logs",
    "max_lora_rank": 1,
}


def spec(**changes: object) -> ReplicaSpec:
    return ReplicaSpec.model_validate(FIELDS | changes)


def test_the_command_line_for_a_gpu() -> None:
    command = command_line(spec(max_model_len=4096, extra_args={"gpu-memory-utilization": 0.85}), 9000)
    assert command == [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--host", "127.0.0.1", "--port", "9000",
        "--model", "Qwen/Qwen2.5-Math-1.5B", "--served-model-name", "Qwen/Qwen2.5-Math-1.5B", "--dtype", "bfloat16",
        "--enable-lora", "--max-lora-rank", "1", "--max-loras", "6", "--max-cpu-loras", "12",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--disable-uvicorn-access-log",
        "--max-model-len", "4096",
        "--gpu-memory-utilization", "0.85",
    ]  # fmt: skip


def test_the_command_line_for_a_cpu_never_splits_a_prefill() -> None:
    command = command_line(spec(device="cpu", dtype="float32", model="/m", max_lora_rank=9), 9000)
    assert command[3:] == [
        "--host", "127.0.0.1", "--port", "9000",
        "--model", "/m", "--served-model-name", "Qwen/Qwen2.5-Math-1.5B", "--dtype", "float32",
        "--enable-lora", "--max-lora-rank", "16", "--max-loras", "6", "--max-cpu-loras", "12",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--disable-uvicorn-access-log",
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192",
    ]  # fmt: skip


def test_the_environment_for_a_cpu() -> None:
    base = {"PATH": "/bin", "BUCKET_GRPO_TOKEN": "secret"}
    assert environment(spec(device="cpu", cpu_threads=1, kv_cache_gib=2), base) == {
        "PATH": "/bin",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def test_the_environment_for_a_gpu_leaves_cpu_settings_alone() -> None:
    assert set(environment(spec(), {})) == {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "for_vllm"),
    [(1, 1), (2, 8), (8, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 320), (321, 512)],
)
def test_the_rank_is_the_next_one_that_vllm_knows(rank: int, for_vllm: int) -> None:
    assert spec(max_lora_rank=rank).vllm_lora_rank == for_vllm


def test_adapters_in_a_batch_follow_from_staleness_and_runs() -> None:
    assert loras_for(max_staleness=4) == 6
    assert loras_for(max_staleness=4, runs=3) == 18


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("dtype", "'dtype'"),
        ("--max-loras", "'max_loras'"),
        ("max_lora_rank", "'max_lora_rank'"),
        ("no-enable-lora", "the same for every replica"),
        ("host", "the same for every replica"),
        ("api-key", "the same for every replica"),
    ],
)
def test_a_flag_that_we_own_is_refused_with_ours_named(flag: str, ours: str) -> None:
    with pytest.raises(ValidationError, match=ours):
        spec(extra_args={flag: "x"})


def test_chunked_prefill_is_ours_on_a_cpu_only() -> None:
    assert "--enable-chunked-prefill" in command_line(spec(extra_args={"enable-chunked-prefill": True}), 9000)
    with pytest.raises(ValidationError, match="enable-chunked-prefill"):
        spec(device="cpu", extra_args={"enable-chunked-prefill": True})


@pytest.mark.parametrize(
    "changes",
    [
        {"max_loras": 6, "max_cpu_loras": 6},
        {"max_lora_rank": 513},
        {"dtype": "auto"},
        {"port": 8000, "vllm_port": 8000},
        {"device": "cpu", "max_model_len": 8193},
        {"max_lorass": 3},
    ],
)
def test_what_cannot_work_is_refused(changes: dict) -> None:
    with pytest.raises(ValidationError):
        spec(**changes)


def test_extra_flags_of_every_kind() -> None:
    extra = {"enforce-eager": True, "enable-prefix-caching": False, "seed": 3, "allowed-origins": ["a", "b"], "x": None}
    tail = ["--enforce-eager", "--no-enable-prefix-caching", "--seed", "3", "--allowed-origins", "a", "b", "--x"]
    assert command_line(spec(extra_args=extra), 9000)[-len(tail) :] == tail


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "agent.json:1: not JSON"),
        (json.dumps(FIELDS | {"replicas": 2}), "replicas: Extra inputs are not permitted"),
        (json.dumps({**FIELDS, "port": "x"}), "port: "),
    ],
)
def test_a_bad_config_file_is_one_clear_line(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "agent.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"agent\.json") as error:
        ReplicaSpec.read(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def server_info(**changes: object) -> dict:
    config = {
        "model_config": {
            "dtype": "torch.bfloat16", "max_model_len": 4096, "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        },
        "lora_config": {"max_lora_rank": 1, "max_loras": 6, "max_cpu_loras": 12, "lora_dtype": "torch.bfloat16"},
        "parallel_config": {"data_parallel_size": 1},
        "scheduler_config": {"enable_chunked_prefill": True},
    }  # fmt: skip
    for path, value in changes.items():
        section, _, key = path.partition("__")
        config[section][key] = value
    return config


def test_a_server_that_runs_as_asked_is_accepted() -> None:
    assert mismatches(spec(), server_info()) == []


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"model_config__dtype": "torch.float16"}, "--dtype float16"),
        ({"lora_config__max_lora_rank": 8}, "--max-lora-rank 8"),
        ({"lora_config__max_loras": 1}, "--max-loras 1"),
        ({"model_config__logprobs_mode": "raw_logprobs"}, "--logprobs-mode raw_logprobs"),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 2"),
    ],
)
def test_a_server_that_runs_otherwise_is_named_by_flag(change: dict, flag: str) -> None:
    (problem,) = mismatches(spec(), server_info(**change))
    assert flag in problem


def test_a_server_without_lora_is_refused() -> None:
    assert "--enable-lora" in mismatches(spec(), server_info() | {"lora_config": None})[0]
