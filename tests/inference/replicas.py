"""A replica as a process (the real agent, with a real or a fake vLLM) and versions for it to serve."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fake_vllm import expected_logprobs
from safetensors.numpy import save_file

from bucket_grpo.bucket_sync.version_file import Canary, pack_version, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.inference.replica import run_replica
from bucket_grpo.inference.spec import ReplicaSpec
from bucket_grpo.runtime.processes import free_port

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
    """`terminate` asks it to stop, as SIGTERM does; `ended` waits for that and gives the exit status."""

    client: httpx.Client
    log_dir: Path
    terminate: Callable[[], object]
    ended: Callable[[], int]
    pid: int

    def want(self, *refs: VersionRef) -> dict[str, Any]:
        answer = self.client.put("/agent/wanted", json={"versions": [ref.model_dump() for ref in refs]})
        answer.raise_for_status()
        return answer.json()

    def status(self, after: int = -1, wait: float = 0.0) -> dict[str, Any]:
        answer = self.client.get("/agent/status", params={"after": after, "wait": wait})
        answer.raise_for_status()
        return answer.json()

    def wait_for(self, condition: Callable[[dict[str, Any]], object], timeout_s: float = 30.0) -> dict[str, Any]:
        """The first status for which `condition` holds; fails with the last one seen."""
        deadline = time.monotonic() + timeout_s
        status = self.status()
        while not condition(status):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {json.dumps(status, indent=1)}"
            status = self.status(after=status["seq"], wait=0.5)
        return status

    def wait_state(self, ref: VersionRef, state: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """That version's status, once it is in `state`."""
        status = self.wait_for(lambda s: s["versions"].get(ref.name, {}).get("state") == state, timeout_s)
        return status["versions"][ref.name]

    def complete(self, model: object, **fields: object) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "seed": 1, **fields}
        return self.client.post("/v1/completions", json=body)


def spec_for(folder: Path, bucket: Path, port: int, **changes: object) -> dict[str, object]:
    return {
        "replica": "r0",
        "port": port,
        "served_model_name": BASE,
        "dtype": "float32",
        "run": "demo",
        "bucket": str(bucket),
        "staging_dir": str(folder / "staging"),
        "log_dir": str(folder / "logs"),
        "max_lora_rank": 1,
        "max_model_len": 1024,
        "cpu_threads": 1,
        **changes,
    }


def fake_command(script: Path) -> list[str]:
    return ["env", f"FAKE_VLLM={script}", sys.executable, str(Path(__file__).with_name("fake_vllm.py"))]


@contextlib.contextmanager
def replica_in_thread(
    folder: Path, bucket: Path, script: Path, *, token: str | None = None, **changes: object
) -> Iterator[Replica]:
    """The agent in a thread of this process, over the fake vLLM: starts in a tenth of a process's time."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    fields = spec_for(folder, bucket, port, model="fake/model", vllm_command=fake_command(script), **changes)
    spec = ReplicaSpec.model_validate(fields)
    spec.log_dir.mkdir()
    loop, asked = asyncio.new_event_loop(), asyncio.Event()
    outcome: Future[int] = Future()

    def work() -> None:
        try:
            outcome.set_result(loop.run_until_complete(run_replica(spec, listener, token, asked)))
        except BaseException as error:  # noqa: BLE001 - raised again by `ended`
            outcome.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    terminate = partial(loop.call_soon_threadsafe, asked.set)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
            yield Replica(client, spec.log_dir, terminate, partial(outcome.result, 40), os.getpid())
    finally:
        terminate()
        thread.join(40)
        loop.close()


@contextlib.contextmanager
def replica_process(
    folder: Path, bucket: Path, *, env: Mapping[str, str] | None = None, **changes: object
) -> Iterator[Replica]:
    """`python -m bucket_grpo.inference` as a launcher starts it."""
    port = free_port()
    config = folder / "agent.json"
    config.write_text(json.dumps(spec_for(folder, bucket, port, **changes)))
    command = [sys.executable, "-m", "bucket_grpo.inference", "--config", str(config)]
    process = subprocess.Popen(command, env={**os.environ, **(env or {})}, stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until_listening(client, process)
            yield Replica(client, folder / "logs", process.terminate, partial(process.wait, 40), process.pid)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def wait_until_listening(client: httpx.Client, process: subprocess.Popen[str], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            client.get("/health")
            return
        except httpx.ConnectError:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the agent does not listen"
            time.sleep(0.05)
