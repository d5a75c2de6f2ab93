"""A proxy on a real socket in the test's own event loop, with fake agents behind it."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fake_agent import BASE, FakeAgent

from bucket_grpo.bucket_sync.vocabulary import VersionRef, served_name
from bucket_grpo.proxy.app import build_app
from bucket_grpo.proxy.config import ProxyConfig, Secrets
from bucket_grpo.proxy.http_server import BoundedHttpProtocol

RUN, INCARNATION = "demo", "20261130t154500z-a1b2c3"


def ref(number: int, content: str = "") -> VersionRef:
    digest = hashlib.sha256(f"{number}{content}".encode()).hexdigest()
    return VersionRef(run=RUN, incarnation=INCARNATION, number=number, sha256=digest, size=100, step=number * 4)


def name(number: int) -> str:
    return served_name(RUN, INCARNATION, number)


def body(number: int, prompt: list[int] | None = None, **more: Any) -> dict:
    sent = {"model": f"trl-policy-v{number}", "prompt": prompt or [1, 2, 3], "max_tokens": 8, "seed": 7}
    return {**sent, "n": 1, "logprobs": 0, "return_token_ids": True, **more}


@dataclass
class Proxy:
    url: str
    session: aiohttp.ClientSession
    config: ProxyConfig

    async def post(self, path: str, json: Any = None, **options: Any) -> tuple[int, Any]:
        return await self._ask("POST", path, json=json, **options)

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        return await self._ask("GET", path, **options)

    async def put(self, path: str, json: Any) -> tuple[int, Any]:
        return await self._ask("PUT", path, json=json)

    async def _ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.request(method, self.url + path, **options) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except json.JSONDecodeError:
                return response.status, text

    async def announce(self, number: int) -> None:
        status, answer = await self.post("/versions", ref(number).model_dump())
        assert status == 202, answer

    async def live(self, number: int) -> dict:
        await self.announce(number)
        _, found = await self.get(f"/versions/{name(number)}?wait=10")
        assert found["state"] == "live", found
        return found

    async def complete(self, number: int, prompt: list[int] | None = None, **more: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", body(number, prompt, **more))

    async def status(self) -> dict:
        return (await self.get("/status"))[1]

    def journal(self) -> list[dict]:
        files = sorted(self.config.journal_dir.glob("journal-*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@asynccontextmanager
async def proxy_for(
    agents: list[FakeAgent],
    tmp_path: Path,
    *,
    secrets: Secrets | None = None,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Proxy]:
    """Start every agent that is not started yet, and a proxy in front of them."""
    for agent in agents:
        if not agent.url:
            await agent.start()
    config = ProxyConfig(
        run=RUN,
        incarnation=INCARNATION,
        base_model=BASE,
        dtype="float32",
        replicas=[agent.url for agent in agents],
        journal_dir=tmp_path / "journal",
        **{"live_grace_s": 0.5, "park_timeout_s": 5, "journal_sample_frac": 1.0, **settings},
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    app = build_app(config, secrets or Secrets())
    options: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": 1, "lifespan": "on"}
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedHttpProtocol, **options))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or serving.done())
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", session, config)
    finally:
        server.should_exit = True
        await serving
        for agent in agents:
            await agent.stop()


class ProxyProcess:
    """A proxy process on a listening socket that the test holds, as the trainer's supervisor does."""

    def __init__(self, folder: Path, replicas: list[str], **settings: Any) -> None:
        config = {
            "run": RUN,
            "incarnation": INCARNATION,
            "base_model": BASE,
            "replicas": replicas,
            "journal_dir": str(folder / "journal"),
            "live_grace_s": 0.5,
            **settings,
        }
        self.config = folder / "proxy.json"
        self.config.write_text(json.dumps(config))
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.process = self.start()

    def start(self) -> subprocess.Popen:
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "bucket_grpo.proxy", "--config", str(self.config), "--fd", str(fd)]
        self.process = subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self.process

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(15)
        self.listener.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
