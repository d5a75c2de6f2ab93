"""The proxy as a process: it starts or says why not, and may be killed at any time without a request being lost."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from fake_agent import BASE, FakeAgent
from proxy_harness import INCARNATION, RUN, ProxyProcess, body, ref

ADDRESS = "127.0.0.1"


@pytest.mark.anyio
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.long)])
async def test_killed_again_and_again_it_loses_no_version_and_clients_lose_no_request(
    tmp_path: Path, kills: int
) -> None:
    agents = [await FakeAgent("a", delay_s=0.05).start(), await FakeAgent("b", delay_s=0.05).start()]
    proxy = ProxyProcess(tmp_path, [agent.url for agent in agents])
    newest, answered, stop = 0, [], asyncio.Event()
    try:
        async with aiohttp.ClientSession() as session:

            async def insist(method: str, path: str, **options: object) -> dict:
                """As TRL's worker and the publisher: the same call again until it is answered."""
                for _ in range(100):
                    try:
                        async with session.request(method, proxy.url + path, **options) as response:
                            assert response.status < 400, await response.text()
                            return await response.json()
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                        await asyncio.sleep(0.1)
                raise AssertionError(f"{method} {path} was never answered")

            async def publish(number: int) -> None:
                await insist("POST", "/versions", json=ref(number).model_dump())
                found = await insist("GET", f"/versions/{ref(number).name}?wait=20")
                assert found["state"] == "live"

            async def roll_out(worker: int) -> None:
                count = 0
                while not stop.is_set():
                    count += 1
                    sent = body(newest, [worker, count], seed=count)
                    answer = await insist("POST", "/v1/completions", json=sent)
                    answered.append(answer["choices"][0]["token_ids"][0] == (worker + 2 * count) % 1000)

            await publish(1)
            newest = 1
            workers = [asyncio.create_task(roll_out(worker)) for worker in range(16)]
            for number in range(2, kills + 2):
                await asyncio.sleep(0.3)
                proxy.kill()
                proxy.start()
                await publish(number)
                newest = number
            stop.set()
            await asyncio.gather(*workers)
            status = await insist("GET", "/status")
            assert [version["number"] for version in status["versions"]] == list(range(1, kills + 2))
            assert {version["state"] for version in status["versions"]} == {"live"}
            assert (status["live"], status["in_flight"], status["parked"]) == (kills + 1, 0, 0)
            assert len(answered) > 50
            assert all(answered)
            held = {name for agent in agents for name in agent.versions}
            assert held == {ref(number).name for number in range(1, kills + 2)}, "no restart took a version away"
    finally:
        proxy.close()
        for agent in agents:
            await agent.stop()


def run(folder: Path, config: object, **environment: str) -> subprocess.CompletedProcess:
    path = folder / "proxy.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BUCKET_GRPO_")}
    return subprocess.run(
        [sys.executable, "-m", "bucket_grpo.proxy", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**clean, **environment},
    )


@pytest.fixture
def good(tmp_path: Path) -> dict:
    return {"run": RUN, "incarnation": INCARNATION, "base_model": BASE, "journal_dir": str(tmp_path / "journal")}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server((ADDRESS, 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_is_one_clear_line(tmp_path: Path, good: dict, taken: int) -> None:
    done = run(tmp_path, {**good, "port": taken})
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1:{taken}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_is_named(tmp_path: Path, good: dict) -> None:
    done = run(tmp_path, {**good, "replicsa": []})
    assert done.returncode == 2
    assert "replicsa" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_open_address_without_a_key_is_refused(tmp_path: Path, good: dict) -> None:
    done = run(tmp_path, {**good, "host": "0.0.0.0", "port": 0})
    assert done.returncode == 2
    assert "BUCKET_GRPO_API_KEY" in done.stderr


def test_a_journal_folder_that_cannot_be_made_is_named(tmp_path: Path, good: dict) -> None:
    (tmp_path / "file").write_text("")
    done = run(tmp_path, {**good, "journal_dir": str(tmp_path / "file" / "journal")})
    assert done.returncode == 2
    assert str(tmp_path / "file" / "journal") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "{")
    assert done.returncode == 2
    assert "proxy.json" in done.stderr
