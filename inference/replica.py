"""A replica as a whole: the parts put together, run until something ends it, and ended in the right order."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Iterator

import aiohttp
import uvicorn

from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import Store, open_store
from bucket_grpo.inference.agent import Agent
from bucket_grpo.inference.board import Board
from bucket_grpo.inference.reconcile import Reconciler
from bucket_grpo.inference.run_watch import until_run_ends
from bucket_grpo.inference.spec import ReplicaSpec
from bucket_grpo.inference.supervisor import Supervisor

STOPPED, ENGINE_GAVE_UP = 0, 4
# After giving up, the reason stays readable on the status API for this long.
LAST_WORDS_S = 3.0


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM means to drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_replica(spec: ReplicaSpec, listener: socket.socket, token: str | None, asked: asyncio.Event) -> int:
    """Serve on `listener` until `asked` to stop, the run's end, or the engine's last death; returns the exit status."""
    store = open_store(spec.bucket)
    fallback = None if spec.bucket_fallback is None else open_store(spec.bucket_fallback)
    stager = Stager(store, fallback, spec.staging_dir, spec.served_model_name)
    stager.keep_only([])  # what an agent that died left behind
    board = Board(spec.replica, spec.served_model_name, spec.dtype)
    # Control calls must not wait for one of the many connections that completions hold.
    async with (
        aiohttp.ClientSession(connector=connector(limit=0)) as hot,
        aiohttp.ClientSession(connector=connector(limit=16)) as control,
    ):
        supervisor = Supervisor(spec, board, control)
        agent = Agent(board, supervisor, hot, token)
        server = Server(
            uvicorn.Config(
                agent, log_level="warning", access_log=False, timeout_graceful_shutdown=2, timeout_keep_alive=75
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        engine = asyncio.create_task(supervisor.run())
        reconciling = asyncio.create_task(Reconciler(spec, board, supervisor, stager).run())
        stop = asyncio.create_task(asked.wait())
        run_ends = asyncio.create_task(_run_end(store, spec.run, spec.run_dead_after_s))
        parts = (serving, engine, reconciling, stop, run_ends)
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if engine.done() and (cause := engine.result()):
                say(spec, f"gives up: {cause}")
                await asyncio.wait({stop}, timeout=LAST_WORDS_S)
                return ENGINE_GAVE_UP
            if stop.done() or run_ends.done():
                reason = run_ends.result() if run_ends.done() else "it was asked to stop"
                say(spec, f"ends: {reason}")
                await drain(agent, board, spec.drain_grace_s, reason)
                return STOPPED
            (serving if serving.done() else reconciling).result()
            raise RuntimeError("the agent's server ended by itself")
        finally:
            for task in (reconciling, run_ends, stop):
                task.cancel()
            await supervisor.stop()
            server.should_exit = True
            await asyncio.gather(*parts, return_exceptions=True)


async def _run_end(store: Store, run: str, dead_after_s: float | None) -> str:
    if dead_after_s is None:
        await asyncio.Event().wait()  # until cancelled
        raise AssertionError("unreachable")
    return await until_run_ends(store, run, dead_after_s)


async def drain(agent: Agent, board: Board, grace_s: float, reason: str) -> None:
    """Take no new requests, and let those in flight finish for `grace_s` seconds at most."""
    agent.hot.draining = True
    board.set_engine("stopping", reason)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while board.in_flight.total():
                await asyncio.sleep(0.05)


def connector(limit: int) -> aiohttp.TCPConnector:
    """At most `limit` connections to vLLM (0: no limit). vLLM closes idle ones after 5 s, and a request that is sent at
    that moment would fail, so ours are closed before."""
    return aiohttp.TCPConnector(limit=limit, keepalive_timeout=3.0)


def say(spec: ReplicaSpec, message: str) -> None:
    print(f"replica {spec.replica} {message}", file=sys.stderr, flush=True)
