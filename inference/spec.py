"""What one replica is told, and the vLLM command line and environment that follow from it. Pure.

The flags that decide whether a replica answers with the right weights are ours alone; every other vLLM flag passes
through `extra_args`. Where a value looks arbitrary, the comment names the failure that it prevents.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
Dtype = Literal["float32", "bfloat16", "float16"]
FlagValue = bool | int | float | str | list[str] | None

# vLLM flag → what decides it. `None` where the value is fixed for every replica.
OWNED_FLAGS: dict[str, str | None] = {
    "host": None,
    "port": "vllm_port",
    "model": "model",
    "served-model-name": "served_model_name",
    "dtype": "dtype",
    "enable-lora": None,
    "max-lora-rank": "max_lora_rank",
    "max-loras": "max_loras",
    "max-cpu-loras": "max_cpu_loras",
    "max-model-len": "max_model_len",
    "lora-modules": None,
    "lora-dtype": "dtype",
    "logprobs-mode": None,
    "generation-config": None,
    "api-key": None,
    "config": None,
    "data-parallel-size": None,
    "enable-prompt-embeds": None,
}
OWNED_ON_CPU: dict[str, str | None] = {"enable-chunked-prefill": None, "max-num-batched-tokens": None}
# A seeded request whose prefill is split kills the CPU engine ("CPU Generator does not use offset"), and TRL seeds
# every request: prefill is never split, so one step must hold the longest prompt.
CPU_BATCHED_TOKENS = 8192


class ReplicaSpec(BaseModel):
    """`python -m bucket_grpo.inference --config agent.json`; every key that is not a field below is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica: str = Field(min_length=1)
    """Name of this replica in reports."""
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    """The one port that others reach: the agent's."""
    vllm_port: int = Field(default=0, ge=0, le=65535)
    """vLLM's own port on loopback; 0 takes a free one at each start."""
    model: str = Field(min_length=1)
    """Path or Hub id of the base model."""
    served_model_name: str = Field(min_length=1)
    """The name that versions must name as their base."""
    dtype: Dtype
    """The trainer's. vLLM's `auto` would serve an fp32 checkpoint in bf16."""
    device: Literal["cpu", "cuda"] = "cpu"
    run: str
    bucket: str = Field(min_length=1)
    """Path of the mounted bucket, or `hf://buckets/<namespace>/<name>`."""
    bucket_fallback: str | None = None
    """Where to read a version that the mount does not give in time, e.g. `hf://buckets/<namespace>/<name>`."""
    run_dead_after_s: float | None = Field(default=None, gt=0)
    """Seconds without a heartbeat of the run's trainer after which the replica ends itself, as it does when the run is
    finished. Default: never, for replicas that a launcher on the same machine ends."""
    staging_dir: Path
    """Local disk for unpacked versions; never a mount: a slow read would stall decoding."""
    log_dir: Path
    max_lora_rank: int = Field(ge=1, le=LORA_RANKS[-1])
    """The adapters' rank; vLLM gets the next one that it knows."""
    max_loras: int = Field(default=6, ge=1)
    """Adapters in one batch: `max_staleness + 2` for each run that shares the replica; see `loras_for`."""
    max_cpu_loras: int | None = None
    """Adapters kept in host memory; must exceed `max_loras`. Default: twice `max_loras`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and completion together. Default: what the model's config says."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on CPU, GiB. On a GPU vLLM sizes it by `gpu-memory-utilization`."""
    cpu_threads: int = Field(default_factory=lambda: max(1, (os.cpu_count() or 2) // 2), ge=1)
    """OpenMP threads of a CPU engine. Replicas on one machine should not ask for more than its cores together."""
    extra_args: dict[str, FlagValue] = Field(default_factory=dict)
    """More vLLM flags, e.g. `{"gpu-memory-utilization": 0.85, "enforce-eager": true}`."""
    vllm_command: list[str] = Field(
        default_factory=lambda: [sys.executable, "-m", "vllm.entrypoints.openai.api_server"], min_length=1
    )
    # The `vllm` console script is not used: the CPU build carries no metadata of that name, so the script fails there.
    canary_tolerance: float | None = Field(default=None, gt=0)
    """Largest difference of a logprob to the trainer's. Default: by dtype, see `canary.TOLERANCE`."""
    stall_after_s: float = Field(default=15.0, gt=0)
    """Seconds without a generated token, while requests are in flight, after which the engine is restarted."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that vLLM may take to answer `/health`."""
    drain_grace_s: float = Field(default=20.0, ge=0)
    """Seconds that requests in flight get to finish after SIGTERM."""
    max_engine_deaths: int = Field(default=3, ge=1)
    """Deaths in a row, each before the engine ran well for a while, after which the agent gives up."""

    @field_validator("extra_args")
    @classmethod
    def _plain_names(cls, extra: dict[str, FlagValue]) -> dict[str, FlagValue]:
        return {flag.lstrip("-").replace("_", "-"): value for flag, value in extra.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        owned = OWNED_FLAGS | (OWNED_ON_CPU if self.device == "cpu" else {})
        for flag in self.extra_args:
            name = flag.removeprefix("no-")
            if name in owned:
                ours = owned[name]
                raise ValueError(
                    f"extra_args: --{flag} is set by bucket-grpo: "
                    + (f"use {ours!r} instead" if ours else "its value is the same for every replica")
                )
        if self.max_cpu_loras is not None and self.max_cpu_loras <= self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be more than max_loras ({self.max_loras})")
        if self.device == "cpu" and (self.max_model_len or 0) > CPU_BATCHED_TOKENS:
            raise ValueError(f"max_model_len ({self.max_model_len}) is more than {CPU_BATCHED_TOKENS}, the most on CPU")
        if self.vllm_port == self.port:
            raise ValueError(f"port and vllm_port are both {self.port}")
        return self

    @property
    def vllm_lora_rank(self) -> int:
        return next(rank for rank in LORA_RANKS if rank >= self.max_lora_rank)

    @property
    def vllm_cpu_loras(self) -> int:
        return self.max_cpu_loras or 2 * self.max_loras

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises `ValueError` with one clear line for a file that is missing, not JSON, or not a spec."""
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'spec'}: {item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            )
            raise ValueError(f"{path}: {details}") from error


def loras_for(max_staleness: int, runs: int = 1) -> int:
    """How many adapters one batch must hold: for each run those within the staleness bound, one above, one ahead."""
    return (max_staleness + 2) * runs


def command_line(spec: ReplicaSpec, vllm_port: int) -> list[str]:
    """The command that starts vLLM on loopback at `vllm_port`."""
    flags: dict[str, FlagValue] = {
        "host": "127.0.0.1",
        "port": vllm_port,
        "model": spec.model,
        "served-model-name": spec.served_model_name,
        "dtype": spec.dtype,
        "enable-lora": True,
        "max-lora-rank": spec.vllm_lora_rank,
        "max-loras": spec.max_loras,
        "max-cpu-loras": spec.vllm_cpu_loras,
        # TRL's importance weights need the distribution that was sampled from, not the raw one.
        "logprobs-mode": "processed_logprobs",
        # The model's own generation config would change temperature and top_p behind the trainer's back.
        "generation-config": "vllm",
        # One line for each completion would be most of the log, and hide why vLLM died.
        "disable-uvicorn-access-log": True,
    }
    if spec.max_model_len is not None:
        flags["max-model-len"] = spec.max_model_len
    if spec.device == "cpu":
        flags |= {"enable-chunked-prefill": False, "max-num-batched-tokens": CPU_BATCHED_TOKENS}
    return [*spec.vllm_command, *as_arguments(flags | spec.extra_args)]


def as_arguments(flags: Mapping[str, FlagValue]) -> list[str]:
    arguments: list[str] = []
    for flag, value in flags.items():
        if value is True or value is None:
            arguments.append(f"--{flag}")
        elif value is False:
            arguments.append(f"--no-{flag}")
        else:
            arguments += [f"--{flag}", *(value if isinstance(value, list) else [str(value)])]
    return arguments


def environment(spec: ReplicaSpec, base: Mapping[str, str]) -> dict[str, str]:
    """vLLM's environment: `base` without the agent's own token, and what the replica needs."""
    env = {key: value for key, value in base.items() if key != "BUCKET_GRPO_TOKEN"}
    env |= {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Opens /server_info, and much that the agent does not let through.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if spec.device == "cpu":
        threads = str(spec.cpu_threads)
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_cache_gib),
            # vLLM's own binding pins every replica of a machine to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            # With LoRA the CPU engine runs eagerly; what is left of torch.compile only costs the first request its time
            # (18 s with a cold cache, for counting ranks of logprobs) and a C++ compiler.
            "TORCH_COMPILE_DISABLE": "1",
            # Runs the worker inside the engine's process: one process and one import of vLLM less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return env
