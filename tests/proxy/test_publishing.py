"""Plain TRL scripts load an adapter by its path: through the bucket to every replica, or it fails with a reason."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from fake_agent import BASE, FakeAgent
from proxy_harness import INCARNATION, RUN, name, proxy_for, until

from bucket_grpo.bucket_sync.publisher import Publisher, PublishFailed
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.version_file import verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionState, version_key
from bucket_grpo.bucket_sync.wire import VersionStatus

sys.path.insert(0, str(Path(__file__).parent.parent / "bucket_sync"))
from peft_folders import write_adapter

pytestmark = pytest.mark.anyio


def load(number: int, path: Path) -> dict:
    return {"lora_name": f"trl-policy-v{number}", "lora_path": str(path), "load_inplace": False}


async def test_a_loaded_adapter_is_one_file_in_the_bucket_and_live_when_the_call_returns(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=BASE)
    agents = [FakeAgent("a"), FakeAgent("b")]
    async with proxy_for(agents, tmp_path, bucket=str(bucket)) as proxy:
        assert (await proxy.post("/v1/load_lora_adapter", load(1, adapter)))[0] == 200
        assert all(name(1) in agent.versions for agent in agents)
        assert (await proxy.complete(1))[0] == 200
        data = (bucket / version_key(RUN, INCARNATION, 1)).read_bytes()
        assert verify_version(data, base_model=BASE).ref.number == 1
        assert (await proxy.post("/v1/load_lora_adapter", load(1, adapter)))[0] == 200, "a cut call may be repeated"


async def test_an_adapter_that_must_not_be_served_is_a_400_that_names_the_tensor(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    wrong = write_adapter(tmp_path / "adapter", base_model_name_or_path="somebody/else")
    async with proxy_for([FakeAgent("a")], tmp_path, bucket=str(bucket)) as proxy:
        status, answer = await proxy.post("/v1/load_lora_adapter", load(1, wrong))
        assert status == 400
        assert "somebody/else" in answer["error"]["message"]
        status, answer = await proxy.post("/v1/load_lora_adapter", load(1, tmp_path / "nothing"))
        assert status == 400
        assert str(tmp_path / "nothing") in answer["error"]["message"]
    assert list(bucket.rglob("*.safetensors")) == []


async def test_an_adapter_that_every_replica_refuses_fails_the_call_with_the_cause(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=BASE)
    failed = VersionStatus(state=VersionState.FAILED, reason="rank 64 is above max_lora_rank")
    async with proxy_for([FakeAgent("a", load=lambda _: failed)], tmp_path, bucket=str(bucket)) as proxy:
        status, answer = await proxy.post("/v1/load_lora_adapter", load(1, adapter))
        assert status == 500
        assert "rank 64 is above max_lora_rank" in answer["error"]["message"]


async def test_a_newer_start_of_the_run_stops_the_older_ones_publishing(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    (bucket / RUN).mkdir(parents=True)
    at = "2026-11-30T16:00:00Z"
    newer = {"run": RUN, "incarnation": "20991231t000000z-ffffff", "started_at": at, "heartbeat_at": at}
    (bucket / RUN / "current.json").write_text(json.dumps(newer))
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=BASE)
    async with proxy_for([FakeAgent("a")], tmp_path, bucket=str(bucket)) as proxy:
        status, answer = await proxy.post("/v1/load_lora_adapter", load(1, adapter))
        assert status == 409
        assert "20991231t000000z-ffffff" in answer["error"]["message"]


async def test_without_a_bucket_the_call_says_what_is_missing(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        status, answer = await proxy.post("/v1/load_lora_adapter", load(1, tmp_path))
        assert status == 400
        assert "set bucket" in answer["error"]["message"]
        assert (await proxy.post("/v1/load_lora_adapter", load(0, tmp_path)))[0] == 400


async def test_the_trainers_publisher_and_the_proxy_understand_each_other(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    agents = [FakeAgent("a"), FakeAgent("b")]
    live: list[int] = []
    async with proxy_for(agents, tmp_path) as proxy:
        identity = {"run": RUN, "incarnation": INCARNATION, "base_model": BASE}
        publisher = Publisher(open_store(bucket), proxy.url, max_staleness=4, on_live=live.append, **identity)
        for number in range(1, 5):
            adapter = write_adapter(tmp_path / f"adapter-{number}", seed=number, base_model_name_or_path=BASE)
            await asyncio.to_thread(publisher.submit, number, 4 * number, adapter)
            await asyncio.to_thread(publisher.wait_live, number, 20)
            assert (await proxy.complete(number))[0] == 200
        publisher.retire(1)
        await until(lambda: all(name(1) not in agent.versions for agent in agents))
        await asyncio.to_thread(publisher.close, 10)
    assert live == [1, 2, 3, 4]
    assert publisher.stats()["failure"] is None


async def test_a_version_that_fails_everywhere_stops_the_trainers_publisher(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    failed = VersionStatus(state=VersionState.FAILED, reason="LoRA has no effect")
    async with proxy_for([FakeAgent("a", load=lambda _: failed)], tmp_path) as proxy:
        identity = {"run": RUN, "incarnation": INCARNATION, "base_model": BASE}
        publisher = Publisher(open_store(bucket), proxy.url, max_staleness=4, **identity)
        adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=BASE)
        await asyncio.to_thread(publisher.submit, 1, 4, adapter)
        with pytest.raises(PublishFailed, match="LoRA has no effect"):
            await asyncio.to_thread(publisher.wait_live, 1, 20)
        await asyncio.to_thread(publisher.close, 10)


async def test_a_proxy_that_lost_its_memory_reads_the_bucket_for_what_agents_hold(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path=BASE)
    agent = FakeAgent("a")
    await agent.start()
    port = agent.port
    async with proxy_for([agent], tmp_path / "first", bucket=str(bucket)) as proxy:
        for number in (1, 2):
            assert (await proxy.post("/v1/load_lora_adapter", load(number, adapter)))[0] == 200
    held = dict(agent.versions)
    agent.wishes.clear()
    await agent.start(port)
    agent.versions = held
    async with proxy_for([agent], tmp_path / "second", bucket=str(bucket)) as proxy:
        assert (await proxy.complete(2))[0] == 200
        await until(lambda: bool(agent.wishes))
        assert agent.wishes[0] == [name(1), name(2)]
