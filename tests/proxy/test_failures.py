"""Replicas die, stall, lie and come back: no request is lost that a replica can still answer."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from fake_agent import FakeAgent, answer_for
from proxy_harness import Proxy, body, name, proxy_for, ref, until

from bucket_grpo.bucket_sync.vocabulary import VersionState
from bucket_grpo.bucket_sync.wire import VersionStatus

pytestmark = pytest.mark.anyio


def broken(kind: str, status: int = 200) -> web.StreamResponse:
    if kind == "abort":
        return web.json_response(answer_for({"model": "x", "prompt": [1]}, finish_reason="abort"))
    return web.Response(status=status, text=kind, content_type="application/json")


@pytest.mark.parametrize(
    "odd",
    [
        broken("engine died", 500),
        broken("bad gateway", 502),
        broken("starting", 503),
        broken("abort"),
        broken('{"object": "text_completion"}'),
        broken('{"choices": []}'),
        broken('{"choices": [{"tex'),
        broken("null"),
        broken("", 302),
        broken("", 401),
        broken("not ready", 404),
    ],
    ids=lambda odd: f"{odd.status}-{(odd.text or '')[:12]}",
)
async def test_what_is_no_answer_is_asked_of_another_replica_with_the_same_bytes(
    tmp_path: Path, odd: web.Response
) -> None:
    agents = [FakeAgent("a", misbehave=lambda _: clone(odd)), FakeAgent("b", misbehave=lambda _: clone(odd))]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        first = asyncio.create_task(proxy.complete(1))
        await until(lambda: bool(agents[0].bodies or agents[1].bodies))
        bad, good = sorted(agents, key=lambda agent: -len(agent.bodies))
        good.misbehave = lambda _: None
        assert (await first)[0] == 200
        assert good.bodies[-1] == bad.bodies[0], "same version, same seed"
        routing = (await proxy.status())["routing"]
        assert (routing["requests"], routing["failed"]) == (1, 0)
        assert routing["retried"] >= 1
    assert proxy.journal()[-1]["retries"] >= 1


def clone(odd: web.Response) -> web.Response:
    return web.Response(status=odd.status, body=odd.body, content_type="application/json")


async def test_a_400_is_vllms_word_on_the_request_and_is_never_retried(tmp_path: Path) -> None:
    agents = [
        FakeAgent(key, misbehave=lambda _: web.Response(status=400, text='{"error": "too long"}')) for key in "ab"
    ]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        assert await proxy.complete(1) == (400, {"error": "too long"})
        assert len(agents[0].bodies + agents[1].bodies) == 1


async def test_a_killed_replica_loses_no_request(tmp_path: Path) -> None:
    agents = [FakeAgent("a", delay_s=0.3), FakeAgent("b", delay_s=0.3)]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        calls = [asyncio.create_task(proxy.complete(1, [index], seed=index)) for index in range(40)]
        await until(lambda: all(agent.in_flight >= 10 for agent in agents))
        await agents[0].stop()
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        assert len(agents[1].served) == 40
        status = await proxy.status()
        assert [replica["routable"] for replica in status["replicas"]] == [False, True]
        assert status["routing"]["failed"] == 0


async def test_a_restarted_replica_gets_its_versions_and_its_share_again(tmp_path: Path) -> None:
    agents = [FakeAgent("a"), FakeAgent("b")]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        await proxy.live(2)
        await agents[0].restart()
        await until(lambda: set(agents[0].versions) == {name(1), name(2)})
        async with asyncio.timeout(10):
            while not all(replica["routable"] for replica in (await proxy.status())["replicas"]):
                await asyncio.sleep(0.05)
        await asyncio.gather(*(proxy.complete(2, [index]) for index in range(20)))
        assert len(agents[0].served) >= 5


async def test_a_stalled_engine_gives_its_requests_to_another(tmp_path: Path) -> None:
    agents = [FakeAgent("a"), FakeAgent("b")]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        agents[0].delay_s = 60
        calls = [asyncio.create_task(proxy.complete(1, [index])) for index in range(10)]
        await until(lambda: agents[0].in_flight == 5)
        agents[0].engine = "stalled"
        agents[0].bump()
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        await until(lambda: agents[0].cancelled == 5)


async def test_no_token_for_too_long_is_a_stall_even_if_the_agent_says_ready(tmp_path: Path) -> None:
    agents = [FakeAgent("a", generated=5), FakeAgent("b", generated=5)]
    async with proxy_for(agents, tmp_path, stall_after_s=0.5) as proxy:
        await proxy.live(1)
        agents[0].delay_s = 60
        calls = [asyncio.create_task(proxy.complete(1, [index])) for index in range(4)]
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_without_a_replica_requests_wait_and_go_on_when_one_returns(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        await agent.stop()
        calls = [asyncio.create_task(proxy.complete(1, [index])) for index in range(5)]
        async with asyncio.timeout(5):
            while (await proxy.status())["parked"] < 5:
                await asyncio.sleep(0.02)
        agent.versions = {}
        await agent.start(agent.port)
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        status = await proxy.status()
        assert (status["parked"], status["in_flight"], status["routing"]["parked"]) == (0, 0, 5)


async def test_waiting_ends_with_503_and_the_reason(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path, park_timeout_s=0.5) as proxy:
        await proxy.live(1)
        agent.engine = "dead"
        agent.bump()
        await asyncio.sleep(0.2)
        status, answer = await proxy.complete(1)
        assert status == 503
        assert "its engine is dead" in answer["error"]["message"]
        assert (await proxy.status())["routing"]["failed"] == 1
    assert proxy.journal()[-1]["status"] == 503


async def test_retries_are_bounded_and_spaced(tmp_path: Path) -> None:
    agents = [FakeAgent(key, misbehave=lambda _: broken("no", 502)) for key in "ab"]
    async with proxy_for(agents, tmp_path, max_attempts=4) as proxy:
        await proxy.live(1)
        began = asyncio.get_running_loop().time()
        status, answer = await proxy.complete(1)
        assert status == 503
        assert "4 attempts failed" in answer["error"]["message"]
        assert len(agents[0].bodies) == len(agents[1].bodies) == 2
        assert asyncio.get_running_loop().time() - began > 0.4, "the second round waits"


async def test_a_version_that_is_not_ready_yet_parks_its_requests_only(tmp_path: Path) -> None:
    agent = FakeAgent("a", load=lambda _: VersionStatus(state=VersionState.STAGING))
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.announce(1)
        await until(lambda: name(1) in agent.versions)
        agent.set(name(1), VersionState.READY)
        await proxy.announce(2)
        early = asyncio.create_task(proxy.complete(2))
        assert (await proxy.complete(1))[0] == 200
        assert not early.done()
        agent.set(name(2), VersionState.READY)
        assert (await early)[0] == 200
        assert [served["model"] for served in agent.served] == [name(1), name(2)]


async def test_a_replica_that_sees_a_version_late_answers_nothing_under_its_name_meanwhile(tmp_path: Path) -> None:
    slow = FakeAgent("slow", load=lambda _: VersionStatus(state=VersionState.WANTED))
    agents = [FakeAgent("fast"), slow]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        await asyncio.gather(*(proxy.complete(1, [index]) for index in range(20)))
        assert (len(agents[0].served), len(slow.bodies)) == (20, 0)
        slow.set(name(1), VersionState.READY)
        async with asyncio.timeout(5):
            while len((await proxy.get(f"/versions/{name(1)}"))[1]["ready_on"]) < 2:
                await asyncio.sleep(0.02)
        await asyncio.gather(*(proxy.complete(1, [100 + index]) for index in range(20)))
        assert len(slow.served) > 5


async def test_failed_everywhere_is_reported_to_who_waits_at_once(tmp_path: Path) -> None:
    failed = VersionStatus(state=VersionState.FAILED, reason="wrong shape of q_proj")
    agents = [FakeAgent(key, load=lambda _: failed) for key in "ab"]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.announce(1)
        began = asyncio.get_running_loop().time()
        _, found = await proxy.get(f"/versions/{name(1)}?wait=30")
        assert asyncio.get_running_loop().time() - began < 3
        assert found["state"] == "failed"
        assert found["failed_on"] == {"a": "wrong shape of q_proj", "b": "wrong shape of q_proj"}
        assert (await proxy.complete(1))[0] == 503


async def test_a_client_that_hangs_up_frees_its_replica(tmp_path: Path) -> None:
    agent = FakeAgent("a", delay_s=30)
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        call = asyncio.create_task(proxy.complete(1))
        await until(lambda: agent.in_flight == 1)
        await asyncio.sleep(1.2)
        call.cancel()
        await until(lambda: agent.cancelled == 1)
        await until(lambda: agent.in_flight == 0)
        assert (await proxy.status())["in_flight"] == 0
    assert proxy.journal()[-1]["status"] == 499


async def test_replicas_join_and_leave_while_running(tmp_path: Path) -> None:
    agents = [FakeAgent("a", delay_s=0.02), FakeAgent("b", delay_s=0.02), FakeAgent("c", delay_s=0.02)]
    await agents[2].start()
    async with proxy_for(agents[:2], tmp_path) as proxy:
        await proxy.live(1)
        calls = asyncio.create_task(_stream_of_requests(proxy, 200))
        await proxy.put("/replicas", {"urls": [agent.url for agent in agents]})
        await until(lambda: len(agents[2].served) > 5)
        await proxy.put("/replicas", {"urls": [agents[2].url]})
        assert await calls == {200}
        seen = [len(agent.served) for agent in agents]
        await proxy.complete(1, [7777])
        assert [len(agent.served) for agent in agents] == [seen[0], seen[1], seen[2] + 1]
    await agents[2].stop()


async def _stream_of_requests(proxy: Proxy, count: int) -> set[int]:
    calls = []
    for index in range(count):
        calls.append(asyncio.create_task(proxy.complete(1, [index // 4], seed=index)))
        await asyncio.sleep(0.01)
    return {status for status, _ in await asyncio.gather(*calls)}


async def test_a_restarted_proxy_knows_its_versions_and_takes_none_away(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    await agent.start()
    port = agent.port
    async with proxy_for([agent], tmp_path) as proxy:
        for number in (1, 2, 3):
            await proxy.live(number)
        await proxy.post("/v1/unload_lora_adapter", {"lora_name": "trl-policy-v1"})
        await until(lambda: name(1) not in agent.versions)
    held = dict(agent.versions)
    agent.wishes.clear()
    await agent.start(port)
    agent.versions = held
    async with proxy_for([agent], tmp_path) as proxy:
        assert (await proxy.complete(3))[0] == 200
        assert (await proxy.complete(2))[0] == 200
        await until(lambda: bool(agent.wishes))
        assert agent.wishes[0] == [name(2), name(3)]
        assert (await proxy.get(f"/versions/{name(9)}"))[0] == 404
        assert (await proxy.post("/versions", ref(3).model_dump()))[1]["state"] == "live"


async def test_a_proxy_that_lost_its_memory_waits_before_it_takes_versions_away(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    agent.versions = {name(4): VersionStatus(state=VersionState.READY)}
    async with proxy_for([agent], tmp_path, rebuild_grace_s=3) as proxy:
        early = asyncio.create_task(proxy.complete(4))
        await asyncio.sleep(0.5)
        assert agent.wishes == []
        await proxy.announce(4)
        assert (await early)[0] == 200
        await until(lambda: bool(agent.wishes))
        assert agent.wishes[0] == [name(4)]


async def test_with_a_flaky_replica_every_request_still_gets_its_own_answer(tmp_path: Path) -> None:
    failures = iter(range(10**9))
    flaky = FakeAgent("flaky", misbehave=lambda _: broken("no", 502) if next(failures) % 7 == 0 else None)
    agents = [flaky, FakeAgent("steady")]
    async with proxy_for(agents, tmp_path) as proxy:
        await proxy.live(1)
        for batch in range(5):
            prompts = [[batch, index] for index in range(100)]
            answers = await asyncio.gather(*(proxy.complete(1, prompt, seed=batch) for prompt in prompts))
            for prompt, (status, answer) in zip(prompts, answers, strict=True):
                assert status == 200
                expected = answer_for(body(1, prompt, seed=batch))["choices"][0]["token_ids"]
                assert answer["choices"][0]["token_ids"] == expected
        status = await proxy.status()
        assert status["in_flight"] == status["parked"] == status["routing"]["failed"] == 0
        assert all(replica["in_flight"] == 0 for replica in status["replicas"])
