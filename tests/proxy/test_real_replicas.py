"""The proxy before real replicas (agent and vLLM on CPU): they die, return, join, leave and see versions late."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from proxy_harness import INCARNATION, RUN, ProxyProcess

from bucket_grpo.bucket_sync.version_file import pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.runtime.processes import free_port
from bucket_grpo.trainer import tiny_model

sys.path.insert(0, str(Path(__file__).parent.parent / "inference"))
from reference import canary, logprobs, random_adapter
from replicas import BASE, spec_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = str(tiny_model.path())
IDS = [2, 3, 4, 12, 5, 16, 7, 9, 3, 8]
BACK_S = 90.0


class Node:
    """One replica: an agent with a vLLM, its own view of the bucket, and a port that it keeps."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.bucket, self.port = folder / name, folder / name / "bucket", free_port()
        self.bucket.mkdir(parents=True)
        self.url = f"http://127.0.0.1:{self.port}"
        fields = spec_for(
            self.folder, self.bucket, self.port, model=MODEL, max_model_len=256, replica=name, max_loras=4
        )
        self.config = self.folder / "agent.json"
        self.config.write_text(json.dumps(fields))
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "bucket_grpo.inference", "--config", str(self.config)]
        with (self.folder / "agent.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(40)


class Fleet:
    """Three nodes, the proxy, and the adapters of three versions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = [Node(folder, name) for name in ("r0", "r1", "r2")]
        settings = {"base_model": BASE, "dtype": "float32", "journal_sample_frac": 1.0}
        self.proxy = ProxyProcess(folder, [node.url for node in self.nodes[:2]], **settings)
        self.client = httpx.Client(base_url=self.proxy.url, timeout=120)
        self.adapters = {n: random_adapter(MODEL, folder / f"adapter-{n}", seed=n, base=BASE) for n in (1, 2, 3)}

    def publish(self, number: int, *, seen_late_by: Node | None = None, late_s: float = 0.0) -> VersionRef:
        """Put a version where every node sees it (one of them later), announce it, and wait until it is live."""
        adapter = self.adapters[number]
        data, ref = pack_version(
            adapter,
            run=RUN,
            incarnation=INCARNATION,
            number=number,
            step=4 * number,
            base_model=BASE,
            canary=canary(MODEL, adapter, IDS),
        )

        def show(node: Node) -> None:
            path = node.bucket / ref.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").rename(path)

        for node in self.nodes:
            if node is not seen_late_by:
                show(node)
        if seen_late_by is not None:
            threading.Timer(late_s, show, [seen_late_by]).start()
        assert self.client.post("/versions", json=ref.model_dump()).status_code == 202
        found = self.client.get(f"/versions/{ref.name}?wait=60").json()
        assert found["state"] == "live", found
        return ref

    def status(self) -> dict:
        return self.client.get("/status").json()

    def wait_for(self, condition: Callable[[dict], object], timeout_s: float) -> float:
        """Seconds until the proxy's status fulfils `condition`."""
        began = time.monotonic()
        while not condition(status := self.status()):
            assert time.monotonic() - began < timeout_s, json.dumps(status, indent=1)
            time.sleep(0.2)
        return time.monotonic() - began

    def journal(self) -> list[dict]:
        time.sleep(1)
        files = (self.folder / "journal").glob("journal-*.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def close(self) -> None:
        self.client.close()
        self.proxy.close()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(Node.stop, self.nodes))
        shutil.rmtree(self.folder, ignore_errors=True)


class Rollouts:
    """Groups of 8 seeded completions of the newest version without a pause, as TRL's worker sends them."""

    def __init__(self, fleet: Fleet, version: int) -> None:
        self.fleet, self.version = fleet, version
        self.statuses: list[int] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(worker,)) for worker in range(8)]

    def _run(self, worker: int) -> None:
        draw = random.Random(worker)
        with httpx.Client(base_url=self.fleet.proxy.url, timeout=120) as client:
            count = 0
            while not self._stop.is_set():
                count += 1
                prompt = [*IDS, *(2 + int(digit) for digit in f"{count:05}")]
                body = {"model": f"trl-policy-v{self.version}", "prompt": prompt, "max_tokens": 24, "n": 1}
                body |= {"logprobs": 0, "return_token_ids": True, "seed": draw.getrandbits(63), "temperature": 1.0}
                self.statuses.append(client.post("/v1/completions", json=body).status_code)

    def __enter__(self) -> "Rollouts":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.wait_for(lambda status: all(replica["routable"] for replica in status["replicas"]), 240)
        fleet.publish(1)
        yield fleet
    finally:
        fleet.close()


def ready(status: dict, replica: str, ref: VersionRef) -> bool:
    found = [entry for entry in status["replicas"] if entry["replica"] == replica]
    return bool(found) and found[0]["routable"] and found[0]["versions"].get(ref.name) == "READY"


def test_a_killed_replica_costs_no_rollout_and_serves_again_with_all_versions(fleet: Fleet) -> None:
    ref = fleet.publish(2)
    with Rollouts(fleet, 2) as rollouts:
        fleet.wait_for(lambda status: status["replicas"][0]["in_flight"] > 0, 30)
        fleet.nodes[0].kill()
        time.sleep(3)
        fleet.nodes[0].start()
        back_s = fleet.wait_for(lambda status: ready(status, "r0", ref), BACK_S)
        served = len(fleet.journal())
        fleet.wait_for(lambda status: status["routing"]["requests"] > served + 200, 60)
    print(f"serving again after {back_s:.0f} s; {len(rollouts.statuses)} rollouts")
    assert set(rollouts.statuses) == {200}
    assert fleet.status()["routing"]["failed"] == 0
    replicas = [line["replica"] for line in fleet.journal()[-200:]]
    assert {"r0", "r1"} <= set(replicas), "both work again"


def test_a_replica_that_sees_a_version_late_serves_nothing_of_it_meanwhile(fleet: Fleet) -> None:
    shown_at = time.time() + 5
    with Rollouts(fleet, 2) as rollouts:
        ref = fleet.publish(3, seen_late_by=fleet.nodes[1], late_s=5)
        rollouts.version = 3
        fleet.wait_for(lambda status: ready(status, "r1", ref), 60)
        time.sleep(3)
    assert set(rollouts.statuses) == {200}
    of_r1 = [line for line in fleet.journal() if line["number"] == 3 and line["replica"] == "r1"]
    assert of_r1, "it takes part once it has the version"
    assert min(line["t"] - line["latency_s"] for line in of_r1) > shown_at


def test_replicas_join_and_leave_during_a_run(fleet: Fleet) -> None:
    urls = [node.url for node in fleet.nodes]
    with Rollouts(fleet, 3) as rollouts:
        for wish in (urls, urls[2:]):
            fleet.client.put("/replicas", json={"urls": wish}).raise_for_status()
            fleet.wait_for(lambda status: status["replicas"][-1]["in_flight"] > 0, 120)
            time.sleep(2)
    assert set(rollouts.statuses) == {200}
    assert fleet.status()["routing"]["failed"] == 0
    assert [replica["replica"] for replica in fleet.status()["replicas"]] == ["r2"]


def test_whatever_happened_each_answer_is_of_the_version_that_the_journal_names(fleet: Fleet) -> None:
    lines = [line for line in fleet.journal() if line["status"] == 200 and line["number"] is not None]
    by_replica: dict[str, list[dict]] = {}
    for line in lines:
        by_replica.setdefault(line["replica"], []).append(line)
    assert set(by_replica) == {"r0", "r1", "r2"}
    for line in [line for lines in by_replica.values() for line in random.Random(0).sample(lines, 8)]:
        sample = line["sample"]
        adapter = fleet.adapters[line["number"]]
        expected = logprobs(MODEL, adapter, sample["prompt"] + sample["output"])[len(sample["prompt"]) - 1 :]
        assert np.abs(np.subtract(sample["logprobs"], expected)).max() < 1e-3, line["id"]
