"""Whether the running vLLM is the one that the spec asked for; a difference names the flag. Pure."""

from collections.abc import Mapping
from typing import Any

from bucket_grpo.inference.spec import ReplicaSpec


def mismatches(spec: ReplicaSpec, vllm_config: Mapping[str, Any]) -> list[str]:
    """One line for each setting of `/server_info` that differs from the spec; empty if all is as asked for."""
    lora = vllm_config.get("lora_config")
    if not lora:
        return ["vLLM runs without LoRA: its --enable-lora is missing"]
    model = vllm_config["model_config"]
    expected: list[tuple[str, object, object]] = [
        ("--dtype", spec.dtype, str(model["dtype"]).removeprefix("torch.")),
        ("--max-lora-rank", spec.vllm_lora_rank, lora["max_lora_rank"]),
        ("--max-loras", spec.max_loras, lora["max_loras"]),
        ("--max-cpu-loras", spec.vllm_cpu_loras, lora["max_cpu_loras"]),
        ("--lora-dtype", spec.dtype, str(lora["lora_dtype"]).removeprefix("torch.")),
        ("--logprobs-mode", "processed_logprobs", model["logprobs_mode"]),
        ("--generation-config", "vllm", model["generation_config"]),
        ("--data-parallel-size", 1, vllm_config["parallel_config"]["data_parallel_size"]),
    ]
    if spec.max_model_len is not None:
        expected.append(("--max-model-len", spec.max_model_len, model["max_model_len"]))
    if spec.device == "cpu":
        expected.append(("--enable-chunked-prefill", False, vllm_config["scheduler_config"]["enable_chunked_prefill"]))
    return [
        f"vLLM runs with {flag} {running}, this replica needs {wanted}"
        for flag, wanted, running in expected
        if wanted != running
    ]
