"""An agent with an imagined vLLM behind it: a real server on a real socket that can be told to misbehave.

It exists for failures that a real vLLM can't be made to show at a given moment.
"""

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from bucket_grpo.bucket_sync.vocabulary import VersionState
from bucket_grpo.bucket_sync.wire import AgentStatus, Load, VersionStatus, Wanted

BASE = "tiny"


@dataclass
class FakeAgent:
    """`load` decides what becomes of a wanted version; `misbehave` may answer a completion in vLLM's place."""

    name: str
    token: str | None = None
    engine: str = "ready"
    base_model: str = BASE
    dtype: str = "float32"
    delay_s: float = 0.0
    load: Callable[[str], VersionStatus] = lambda name: VersionStatus(state=VersionState.READY)
    misbehave: Callable[[dict], web.StreamResponse | None] = lambda body: None
    max_loras: int = 6
    seq: int = 0
    epoch: int = 1
    boot_id: str = field(default_factory=lambda: secrets.token_hex(4))
    versions: dict[str, VersionStatus] = field(default_factory=dict)
    served: list[dict] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    wishes: list[list[str]] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    cancelled: int = 0
    generated: int = 0
    url: str = ""

    async def start(self, port: int = 0) -> "FakeAgent":
        app = web.Application(middlewares=[self._authorize])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/agent/status", self._status),
                web.put("/agent/wanted", self._wanted),
                web.get("/server_info", self._server_info),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
            ]
        )
        self._changed = asyncio.Event()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        """As a kill: connections break, nobody listens any more."""
        await self._runner.cleanup()

    async def restart(self) -> None:
        """A new process on the same port: nothing is loaded."""
        await self.stop()
        await asyncio.sleep(0.2)
        self.boot_id, self.seq, self.versions = secrets.token_hex(4), 0, {}
        await self.start(self.port)

    def bump(self) -> None:
        self.seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def set(self, name: str, state: VersionState, reason: str | None = None) -> None:
        self.versions[name] = VersionStatus(state=state, reason=reason)
        self.bump()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "no"}, status=401)
        return await handler(request)

    def _state(self) -> web.Response:
        status = AgentStatus(
            seq=self.seq,
            replica=self.name,
            boot_id=self.boot_id,
            engine_epoch=self.epoch,
            engine=self.engine,  # type: ignore[arg-type]
            base_model=self.base_model,
            dtype=self.dtype,
            max_model_len=512,
            versions=self.versions,
            load=Load(running=self.in_flight, generated_tokens_total=self.generated),
        )
        return web.Response(text=status.model_dump_json(), content_type="application/json")

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine == "ready" else 503)

    async def _status(self, request: web.Request) -> web.Response:
        after, wait = int(request.query.get("after", -1)), float(request.query.get("wait", 0))
        if self.seq <= after:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)
        return self._state()

    async def _wanted(self, request: web.Request) -> web.Response:
        names = [ref.name for ref in Wanted.model_validate_json(await request.read()).versions]
        self.wishes.append(names)
        before = dict(self.versions)
        for name in names:
            if name not in self.versions:
                self.versions[name] = self.load(name)
        for name in [name for name in self.versions if name not in names]:
            del self.versions[name]
        if before != self.versions:
            self.bump()
        return self._state()

    async def _server_info(self, _request: web.Request) -> web.Response:
        config = {
            "model_config": {"model": self.base_model, "dtype": f"torch.{self.dtype}", "max_model_len": 512},
            "lora_config": {"max_loras": self.max_loras, "max_lora_rank": 8},
            "parallel_config": {"data_parallel_size": 1},
        }
        return web.json_response({"vllm_config": config})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.base_model, "max_model_len": 512}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.bodies.append(raw)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if (odd := self.misbehave(body)) is not None:
                return odd
            known = self.versions.get(body["model"])
            if body["model"] != self.base_model and (known is None or known.state is not VersionState.READY):
                return web.json_response({"error": {"message": "not ready"}}, status=404)
            await asyncio.sleep(self.delay_s)
            if not isinstance(body.get("seed", 0), int | None):
                return web.json_response({"error": {"message": "seed is not a number"}}, status=400)
            self.served.append(body)
            self.generated += 4
            if body.get("stream"):
                return await self._events(request)
            return web.json_response(answer_for(body))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(3):
            await response.write(f"data: {index}\n\n".encode())
            await asyncio.sleep(0.05)
        return response


def answer_for(body: dict, finish_reason: str = "stop") -> dict:
    """vLLM's answer: token ids that depend on prompt and seed, as greedy as it gets."""
    prompt = body["prompt"] if isinstance(body.get("prompt"), list) else [1]
    output = [(sum(x for x in prompt if isinstance(x, int)) + (body.get("seed") or 0) + i) % 1000 for i in range(4)]
    choice = {
        "index": 0,
        "text": "text",
        "token_ids": output,
        "logprobs": {"token_logprobs": [-0.5] * 4},
        "finish_reason": finish_reason,
    }
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 4}
    return {"id": "cmpl", "model": body["model"], "choices": [choice], "usage": usage}
