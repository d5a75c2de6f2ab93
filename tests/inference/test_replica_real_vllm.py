"""The same promises under the real vLLM, on CPU in float32."""

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from reference import canary, logprobs, random_adapter
from replicas import BASE, Bucket, Replica, replica_process

from bucket_grpo.bucket_sync.version_file import pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.trainer import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = str(tiny_model.path())
IDS = [2, 3, 4, 12, 5, 16, 7, 9, 3, 8]
START_S = 180.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replica")


@pytest.fixture(scope="module")
def versions(folder: Path) -> Bucket:
    (folder / "bucket").mkdir()
    return Bucket(folder / "bucket")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[int, Path]:
    return {n: random_adapter(MODEL, folder / f"adapter-{n}", seed=n, base=BASE) for n in (1, 2)}


@pytest.fixture(scope="module")
def refs(versions: Bucket, adapters: dict[int, Path]) -> dict[int, VersionRef]:
    return {n: versions.publish_adapter(path, n, canary(MODEL, path, IDS)) for n, path in adapters.items()}


@pytest.fixture(scope="module")
def replica(folder: Path, versions: Bucket) -> Iterator[Replica]:
    with replica_process(folder, versions.root, model=MODEL, max_model_len=256, stall_after_s=8) as running:
        running.wait_for(lambda s: s["engine"] == "ready", START_S)
        yield running


def test_answers_under_a_version_are_those_of_peft(
    replica: Replica, refs: dict[int, VersionRef], adapters: dict[int, Path]
) -> None:
    replica.want(*refs.values())
    for number, ref in refs.items():
        replica.wait_state(ref, "READY", 60)
        sampling = {"max_tokens": 24, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}
        answer = replica.complete(ref.name, prompt=IDS, **sampling)
        choice = answer.json()["choices"][0]
        output, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        expected = logprobs(MODEL, adapters[number], IDS + output)[len(IDS) - 1 :]
        assert np.abs(np.subtract(served, expected)).max() < 1e-4
        other = logprobs(MODEL, adapters[3 - number], IDS + output)[len(IDS) - 1 :]
        assert np.abs(np.subtract(served, other)).max() > 1e-2, "the comparison can tell two versions apart"


def test_a_burst_of_long_seeded_prompts_does_not_kill_the_engine(replica: Replica, refs: dict[int, VersionRef]) -> None:
    replica.want(*refs.values())
    replica.wait_state(refs[1], "READY", 60)
    epoch = replica.status()["engine_epoch"]
    prompt = [2 + i % 10 for i in range(240)]  # 64 of them are twice what one step of the engine may hold

    def complete(seed: int) -> int:
        return replica.complete(refs[1].name, prompt=[*prompt, 2 + seed % 10], max_tokens=8, seed=seed).status_code

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(complete, range(64))) == {200}
    assert replica.status()["engine_epoch"] == epoch


def test_what_must_not_be_served_is_refused_before_it_reaches_vllm(
    replica: Replica, versions: Bucket, adapters: dict[int, Path], refs: dict[int, VersionRef], folder: Path
) -> None:
    loads = replica.status()["loads"]
    whole = (versions.root / refs[1].key).read_bytes()
    identity = {"run": "demo", "incarnation": refs[1].incarnation, "step": 4}

    # A writer that skips every check: the file's own hashes are right, one weight is NaN.
    data = bytearray(whole)
    data[-4:] = np.float32("nan").tobytes()
    nan = relabel(versions, bytes(data), 11)
    truncated = relabel(versions, whole[:-100], 12)
    other = random_adapter(MODEL, folder / "other-base", seed=5, base="another/base")
    data, foreign = pack_version(other, number=13, base_model="another/base", canary=None, **identity)
    versions.put(foreign, data)

    replica.want(nan, truncated, foreign)
    for ref, word in ((nan, "digest"), (truncated, "truncated"), (foreign, "another/base")):
        assert word in replica.wait_state(ref, "FAILED", 30)["reason"]
    assert replica.status()["loads"] == loads
    served = {entry["id"] for entry in replica.client.get("/v1/models").json()["data"]}
    assert not served & {nan.name, truncated.name, foreign.name}


def relabel(versions: Bucket, data: bytes, number: int) -> VersionRef:
    ref = VersionRef(
        run="demo",
        incarnation="20261130t154500z-a1b2c3",
        number=number,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        step=4,
    )
    return versions.put(ref, data)


def test_a_killed_engine_process_is_named_replaced_and_has_its_versions_back(
    replica: Replica, refs: dict[int, VersionRef]
) -> None:
    replica.want(*refs.values())
    names = {ref.name for ref in refs.values()}
    before = replica.wait_for(lambda s: all(s["versions"][name]["state"] == "READY" for name in names))
    seen: list[dict] = []

    def watch() -> None:
        status = before
        while status["engine"] != "starting":
            status = replica.status(after=status["seq"], wait=20)
            seen.append(status)

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = engine_process(replica)
    os.kill(engine.pid, signal.SIGKILL)
    watcher.join(60)
    reasons = [status["reason"] for status in seen if status["engine"] == "dead"]
    assert reasons, f"nobody was told of the death: {seen}"
    assert "EngineCore process ended without a word: it was killed" in reasons[0]
    assert "onnection refused" not in reasons[0]
    replica.wait_for(lambda s: s["engine"] == "ready" and s["engine_epoch"] == before["engine_epoch"] + 1, START_S)
    for ref in refs.values():
        replica.wait_state(ref, "READY", 60)
        assert replica.complete(ref.name).status_code == 200


def test_an_engine_that_stands_still_is_replaced_although_its_health_is_fine(
    replica: Replica, refs: dict[int, VersionRef]
) -> None:
    replica.want(*refs.values())
    replica.wait_state(refs[1], "READY", START_S)
    epoch = replica.status()["engine_epoch"]
    os.kill(engine_process(replica).pid, signal.SIGSTOP)
    assert replica.client.get("/metrics").status_code == 200, "vLLM's own server does not notice"
    assert replica.complete(refs[1].name).status_code in (500, 503), "the request ends with its engine"
    replica.wait_for(lambda s: s["engine"] == "ready" and s["engine_epoch"] == epoch + 1, START_S)
    replica.wait_state(refs[1], "READY", 60)
    assert replica.complete(refs[1].name).status_code == 200


def engine_process(replica: Replica) -> psutil.Process:
    below = psutil.Process(replica.pid).children(recursive=True)
    return next(process for process in below if "EngineCore" in process.name() + " ".join(process.cmdline()))


def test_a_vllm_that_answers_from_the_base_is_found_out(
    tmp_path: Path, versions: Bucket, refs: dict[int, VersionRef]
) -> None:
    lies_about = tmp_path / "lies-about"
    lies_about.write_text("-v2$")
    liar = [sys.executable, str(Path(__file__).with_name("base_liar.py"))]
    env = {"BASE_LIAR": str(lies_about)}
    with replica_process(
        tmp_path, versions.root, env=env, model=MODEL, max_model_len=256, vllm_command=liar
    ) as replica:
        replica.want(*refs.values())
        replica.wait_for(lambda s: s["engine"] == "ready", START_S)
        replica.wait_state(refs[1], "READY", 60)
        reason = replica.wait_state(refs[2], "FAILED", 60)["reason"]
        assert reason.startswith("canary: logprobs differ from the trainer's")
        assert replica.complete(refs[2].name).status_code == 404

        lies_about.write_text(".*")
        os.kill(engine_process(replica).pid, signal.SIGKILL)
        reason = replica.wait_state(refs[1], "FAILED", START_S)["reason"]
        assert "LoRA has no effect" in reason
