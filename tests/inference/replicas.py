"""A replica as a process (the real agent, with a real or a fake vLLM) and versions for it to serve."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_vllm import expected_logprobs
from safetensors.numpy import save_file

from bucket_grpo.bucket_sync.version_file import Canary, pack_version, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.runtime.processes import free_port

FAKE_COMMAND = [sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]
INCARNATION = "20261130t154500z-a1b2c3"
BASE = "base"
PROMPT = [2, 3, 4, 12, 5, 16, 7]


def write_adapter(folder: Path, seed: int = 0, base: str = BASE) -> Path:
    """A rank-1 LoRA on one projection, as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": random.standard_normal((1, 8)).astype(np.float32),
        f"{module}.lora_B.weight": random.standard_normal((8, 1)).astype(np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Bucket:
    """A folder of versions. `publish` makes one whose canary the fake vLLM fulfils."""

    root: Path

    def publish(self, number: int, *, canary: Canary | None = None, seed: int | None = None) -> VersionRef:
        adapter = write_adapter(self.root.parent / f"adapter-{number}", seed if seed is not None else number)
        if canary is None:
            data, _ = pack_version(adapter, **self._identity(number))
            staged = verify_version(data).write_peft_folder(self.root.parent / f"as-staged-{number}")
            weights = (staged / "adapter_model.safetensors").read_bytes()
            canary = Canary(prompt=PROMPT, logprobs=expected_logprobs(weights, PROMPT))
        return self.publish_adapter(adapter, number, canary)

    def publish_adapter(self, adapter: Path, number: int, canary: Canary | None) -> VersionRef:
        data, ref = pack_version(adapter, canary=canary, **self._identity(number))
        return self.put(ref, data)

    def put(self, ref: VersionRef, data: bytes) -> VersionRef:
        path = self.root / ref.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return ref

    def _identity(self, number: int) -> dict[str, Any]:
        return {"run": "demo", "incarnation": INCARNATION, "number": number, "step": 4 * number, "base_model": BASE}


@dataclass
class Replica:
    process: subprocess.Popen[str]
    client: httpx.Client
    log_dir: Path

    def want(self, *refs: VersionRef) -> dict[str, Any]:
        answer = self.client.put("/agent/wanted", json={"versions": [ref.model_dump() for ref in refs]})
        answer.raise_for_status()
        return answer.json()

    def status(self, after: int = -1, wait: float = 0.0) -> dict[str, Any]:
        answer = self.client.get("/agent/status", params={"after": after, "wait": wait})
        answer.raise_for_status()
        return answer.json()

    def wait_for(self, condition: Callable[[dict[str, Any]], object], timeout_s: float = 20.0) -> dict[str, Any]:
        """The first status for which `condition` holds; fails with the last one seen."""
        deadline = time.monotonic() + timeout_s
        status = self.status()
        while not condition(status):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {json.dumps(status, indent=1)}"
            status = self.status(after=status["seq"], wait=0.5)
        return status

    def wait_state(self, ref: VersionRef, state: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """That version's status, once it is in `state`."""
        status = self.wait_for(lambda s: s["versions"].get(ref.name, {}).get("state") == state, timeout_s)
        return status["versions"][ref.name]

    def complete(self, model: object, **fields: object) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "seed": 1, **fields}
        return self.client.post("/v1/completions", json=body)

    def stop(self, timeout_s: float = 40.0) -> tuple[int, str]:
        """SIGTERM; its exit status and what it wrote to stderr."""
        self.process.terminate()
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = 40.0) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors


@contextlib.contextmanager
def running_replica(
    folder: Path, bucket: Path, *, env: Mapping[str, str] | None = None, token: str | None = None, **spec: object
) -> Iterator[Replica]:
    port = free_port()
    config = folder / "agent.json"
    log_dir = folder / "logs"
    fields = {
        "replica": "r0",
        "port": port,
        "served_model_name": BASE,
        "dtype": "float32",
        "run": "demo",
        "bucket": str(bucket),
        "staging_dir": str(folder / "staging"),
        "log_dir": str(log_dir),
        "max_lora_rank": 1,
        "max_model_len": 1024,
        "cpu_threads": 1,
        **spec,
    }
    config.write_text(json.dumps(fields))
    environment = {**os.environ, **(env or {}), **({"BUCKET_GRPO_TOKEN": token} if token else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "bucket_grpo.inference", "--config", str(config)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
            wait_until_listening(client, process)
            yield Replica(process, client, log_dir)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def wait_until_listening(client: httpx.Client, process: subprocess.Popen[str], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.get("/health")
            return
        except httpx.ConnectError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the agent does not listen"
            time.sleep(0.05)
