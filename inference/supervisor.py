"""Keeps one vLLM process running: starts it, sees it die or stall, says why, starts it again, gives up in the end.

vLLM's `/health` is 200 on a stalled scheduler, so health is progress: generated tokens while requests are in flight.
A crash is reported with its cause from vLLM's log; "connection refused" is only what others see of it.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bucket_grpo.inference.board import Board
from bucket_grpo.inference.log_cause import Cause, cause_of_death
from bucket_grpo.inference.spec import ReplicaSpec, command_line, environment
from bucket_grpo.inference.spec_check import mismatches
from bucket_grpo.inference.vllm_client import EngineRefused, EngineUnreachable, VllmClient
from bucket_grpo.runtime.processes import Child, free_port, spawn

POLL_S = 0.1
SCRAPE_EVERY_S = 1.0
STABLE_AFTER_S = 10.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.25, 30.0
STOP_GRACE_S = 12.0  # a little more than the guard gives vLLM


@dataclass
class ProgressWatch:
    """Tells a stalled engine from an idle one. `limit_s` seconds without a sign of life are a stall."""

    limit_s: float
    last_sign_at: float
    tokens: int = 0

    def observe(self, now: float, tokens: int | None, in_flight: int) -> bool:
        """Whether the engine is stalled. `tokens` is its total of generated tokens, `None` if it did not answer."""
        alive = tokens is not None and (tokens != self.tokens or in_flight == 0)
        if alive:
            self.last_sign_at = now
        if tokens is not None:
            self.tokens = tokens
        return now - self.last_sign_at >= self.limit_s


class Supervisor:
    """`client` is vLLM's API while the engine is ready, else `None`."""

    def __init__(self, spec: ReplicaSpec, board: Board, session: aiohttp.ClientSession) -> None:
        self._spec = spec
        self._board = board
        self._session = session
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self.client: VllmClient | None = None
        self.own_requests = 0  # canaries and probes in flight; the board counts those of others

    async def run(self) -> str | None:
        """Keep the engine running until `stop`; returns the cause if it gave up."""
        deaths = 0
        while not self._stopping.is_set():
            ready_for_s, cause = await self._one_life()
            if self._stopping.is_set():
                break
            deaths = 1 if ready_for_s >= STABLE_AFTER_S else deaths + 1
            if cause.permanent or deaths >= self._spec.max_engine_deaths:
                times = "" if cause.permanent else f"vLLM died {deaths} times in a row; the last time: "
                self._board.set_engine("failed", times + cause.text)
                return times + cause.text
            self._board.counters.engine_restarts += 1
            self._board.set_engine("dead", cause.text)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (deaths - 1)))
        return None

    async def stop(self) -> None:
        """End vLLM; what is in flight is lost, so drain first."""
        self._stopping.set()
        self.client = None
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, STOP_GRACE_S)

    async def _one_life(self) -> tuple[float, Cause]:
        """One process from start to death: how long it was ready, in seconds, and why it died."""
        spec, board = self._spec, self._board
        board.engine_epoch += 1
        port = spec.vllm_port or free_port()
        log = spec.log_dir / f"{spec.replica}.vllm-{board.engine_epoch}.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "bucket_grpo.runtime.guard", "--", *command_line(spec, port)]
        board.set_engine("starting")
        # vLLM leaves sockets and rendezvous files in the temporary folder: give each life its own, and remove it.
        scratch = tempfile.mkdtemp(prefix="vllm-")
        env = {**environment(spec, os.environ), "TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch}
        child = self._child = spawn(command, name="vllm", log_path=log, env=env)
        client = VllmClient(self._session, f"http://127.0.0.1:{port}")
        ready_at: float | None = None
        try:
            cause = await self._wait_ready(child, client, log)
            if cause is None:
                ready_at = time.monotonic()
                self.client = client
                board.set_engine("ready")
                cause = await self._watch(child, client, log)
        finally:
            self.client = None
            await asyncio.to_thread(child.stop, 0.5 if child.poll() is None else 0.0)
            shutil.rmtree(scratch, ignore_errors=True)
        board.engine_lost()
        return (0.0 if ready_at is None else time.monotonic() - ready_at), cause

    async def _wait_ready(self, child: Child, client: VllmClient, log: Path) -> Cause | None:
        deadline = time.monotonic() + self._spec.start_timeout_s
        while time.monotonic() < deadline:
            if child.poll() is not None:
                return cause_of_death(child.wait(), log)
            if await client.healthy():
                return await self._check(client)
            await asyncio.sleep(POLL_S)
        return Cause(f"vLLM did not answer within {self._spec.start_timeout_s:.0f} s of its start (log: {log})", True)

    async def _check(self, client: VllmClient) -> Cause | None:
        try:
            problems = mismatches(self._spec, await client.server_info())
            self._board.max_model_len = (await client.models())[self._spec.served_model_name].max_model_len
        except (EngineUnreachable, EngineRefused) as error:
            return Cause(f"vLLM came up but does not answer: {error}", False)
        return Cause("; ".join(problems), True) if problems else None

    async def _watch(self, child: Child, client: VllmClient, log: Path) -> Cause:
        watch = ProgressWatch(self._spec.stall_after_s, time.monotonic())
        next_scrape = 0.0
        while True:
            if child.poll() is not None:
                return cause_of_death(child.wait(), log)
            if time.monotonic() >= next_scrape:
                next_scrape = time.monotonic() + SCRAPE_EVERY_S
                if watch.observe(time.monotonic(), await self._tokens(client), self._in_flight()):
                    stalled = (
                        f"no token was generated for {watch.limit_s:g} s with {self._in_flight()} request(s) in flight"
                    )
                    self._board.set_engine("stalled", stalled)
                    return Cause(f"the engine stalled: {stalled} (log: {log})", False)
            await asyncio.sleep(POLL_S)

    async def _tokens(self, client: VllmClient) -> int | None:
        try:
            self._board.load = await client.load()
        except (EngineUnreachable, EngineRefused):
            return None
        return self._board.load.generated_tokens_total

    def _in_flight(self) -> int:
        return self._board.in_flight.total() + self.own_requests
