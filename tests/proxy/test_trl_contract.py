"""What TRL asks of one vLLM server, answered by a fleet."""

import asyncio
from pathlib import Path

import pytest
from fake_agent import BASE, FakeAgent
from proxy_harness import body, name, proxy_for, until

pytestmark = pytest.mark.anyio


async def test_start_up_calls_of_trl_are_answered_with_the_smallest_limits(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a", max_loras=6), FakeAgent("b", max_loras=5)], tmp_path) as proxy:
        await until_routable(proxy, 2)
        assert (await proxy.get("/health"))[0] == 200
        status, info = await proxy.get("/server_info?config_format=json")
        assert status == 200
        assert info["vllm_config"]["lora_config"] == {"max_loras": 5, "max_lora_rank": 8}
        assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 1
        status, models = await proxy.get("/v1/models")
        assert status == 200
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == (BASE, 512)


async def test_health_is_503_with_the_reason_until_an_engine_is_ready(tmp_path: Path) -> None:
    agent = FakeAgent("a", engine="starting")
    async with proxy_for([agent], tmp_path) as proxy:
        await asyncio.sleep(0.2)
        status, answer = await proxy.get("/health")
        assert status == 503
        assert "starting" in answer["error"]["message"]
        agent.engine = "ready"
        agent.bump()
        await until_routable(proxy, 1)
        assert (await proxy.get("/health"))[0] == 200


async def test_replicas_that_compute_differently_are_an_error_that_names_both(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a"), FakeAgent("b", dtype="bfloat16")], tmp_path) as proxy:
        await until_routable(proxy, 1)
        replicas = (await proxy.status())["replicas"]
        assert [replica["routable"] for replica in replicas] == [True, False]
        assert "bfloat16" in replicas[1]["reason"]


async def test_a_version_is_announced_goes_live_and_answers_under_trls_name(tmp_path: Path) -> None:
    agents = [FakeAgent("a"), FakeAgent("b")]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        status, answer = await proxy.complete(1, [5, 6, 7])
        assert status == 200
        assert len(answer["choices"][0]["token_ids"]) == 4
        served = agents[0].served + agents[1].served
        assert served == [{**body(1, [5, 6, 7]), "model": name(1)}]


async def test_the_body_reaches_vllm_byte_for_byte_but_for_the_model(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    raw = b'{ "prompt":[1,  2,3],"seed": 18446744073709551615 ,"model" : "trl-policy-v1", "temperature":1.0e0}\n'
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        status, _ = await proxy.post("/v1/completions", data=raw)
        assert status == 200
        assert agent.bodies == [raw.replace(b"trl-policy-v1", name(1).encode())]


async def test_pause_and_resume_are_acknowledged_and_stop_nothing(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        await proxy.live(1)
        assert (await proxy.post("/pause?mode=keep"))[0] == 200
        assert (await proxy.complete(1))[0] == 200
        assert (await proxy.get("/is_paused")) == (200, {"is_paused": False})
        assert (await proxy.post("/resume"))[0] == 200


async def test_unloading_an_unknown_version_is_a_success(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        for unknown in ("trl-policy-v9", "somebody-else"):
            assert (await proxy.post("/v1/unload_lora_adapter", {"lora_name": unknown}))[0] == 200


async def test_an_unloaded_version_retires_once_a_newer_one_is_live_and_leaves_the_replicas(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        await proxy.complete(1)
        await proxy.post("/v1/unload_lora_adapter", {"lora_name": "trl-policy-v1"})
        await asyncio.sleep(0.3)
        assert name(1) in agent.versions, "nothing newer is live yet"
        await proxy.live(2)
        await until(lambda: name(1) not in agent.versions)
        assert (await proxy.get(f"/versions/{name(1)}"))[1]["state"] == "retired"


async def test_a_late_request_is_answered_by_the_newest_live_version_and_counted(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        await proxy.live(2)
        await proxy.post("/v1/unload_lora_adapter", {"lora_name": "trl-policy-v1"})
        await until(lambda: name(1) not in agent.versions)
        assert (await proxy.complete(1))[0] == 200
        assert agent.served[-1]["model"] == name(2)
        assert (await proxy.status())["routing"]["late"] == 1
    line = proxy.journal()[-1]
    assert (line["requested"], line["served"], line["number"], line["late"]) == ("trl-policy-v1", name(2), 2, True)
    assert line["route"] == "late"


async def test_groups_stay_together_and_are_spread_over_replicas(tmp_path: Path) -> None:
    agents = [FakeAgent("a", delay_s=0.05), FakeAgent("b", delay_s=0.05)]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        prompts = [[index, 1, 2] for index in range(10)]
        calls = [proxy.complete(1, prompt, seed=seed) for prompt in prompts for seed in range(8)]
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        groups = [{tuple(served["prompt"]) for served in agent.served} for agent in agents]
        assert not groups[0] & groups[1]
        assert sorted(map(len, groups)) == [5, 5]
        routing = (await proxy.status())["routing"]
        assert (routing["requests"], routing["cold"], routing["affinity"], routing["failed"]) == (80, 10, 70, 0)


async def test_a_stream_passes_through_as_it_comes(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        await proxy.live(1)
        arrivals = []
        async with proxy.session.post(proxy.url + "/v1/completions", json=body(1, stream=True)) as response:
            assert response.headers["content-type"] == "text/event-stream"
            async for chunk in response.content.iter_any():
                arrivals.append((asyncio.get_running_loop().time(), chunk))
        assert b"".join(chunk for _, chunk in arrivals) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert arrivals[-1][0] - arrivals[0][0] > 0.08


async def until_routable(proxy, count: int) -> None:
    async with asyncio.timeout(10):
        while sum(replica["routable"] for replica in (await proxy.status())["replicas"]) < count:
            await asyncio.sleep(0.02)
