"""`python -m bucket_grpo.inference --config agent.json`: one replica, until SIGTERM.

Exit status: 0 stopped as asked; 2 the config is wrong; 3 the port is in use; 4 vLLM could not be kept running.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import uvicorn

from bucket_grpo.bucket_sync.stores import StoreError, open_store
from bucket_grpo.inference.agent import Agent
from bucket_grpo.inference.board import Board
from bucket_grpo.inference.reconcile import Reconciler
from bucket_grpo.inference.spec import ReplicaSpec
from bucket_grpo.inference.supervisor import Supervisor

BAD_CONFIG, PORT_IN_USE, ENGINE_GAVE_UP = 2, 3, 4
# After giving up, the reason stays readable on the status API for this long.
LAST_WORDS_S = 5.0


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM means to drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(spec: ReplicaSpec, listener: socket.socket, token: str | None) -> int:
    store = open_store(spec.bucket)
    board = Board(spec.replica, spec.served_model_name, spec.dtype)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # Control calls must not wait for one of the many connections that completions hold.
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as hot,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as control,
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
        reconciling = asyncio.create_task(Reconciler(spec, board, supervisor, store).run())
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, engine, reconciling, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                await drain(agent, board, spec.drain_grace_s)
                return 0
            gave_up = engine.result() if engine.done() else None
            if gave_up:
                print(f"bucket-grpo agent {spec.replica}: {gave_up}", file=sys.stderr, flush=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LAST_WORDS_S)
                return ENGINE_GAVE_UP
            (serving if serving.done() else reconciling).result()
            raise RuntimeError("the agent's server ended by itself")
        finally:
            reconciling.cancel()
            await supervisor.stop()
            server.should_exit = True
            await asyncio.gather(serving, engine, reconciling, return_exceptions=True)
            asked.cancel()


async def drain(agent: Agent, board: Board, grace_s: float) -> None:
    """Let what is in flight finish, for `grace_s` seconds at most."""
    agent.hot.draining = True
    board.set_engine("stopping", "the agent was asked to stop")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            while board.in_flight.total():
                await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bucket_grpo.inference", description="One vLLM replica and its agent."
    )
    parser.add_argument("--config", type=Path, required=True, help="a JSON file; its keys are ReplicaSpec's fields")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        spec = ReplicaSpec.read(arguments.config)
        for folder in (spec.staging_dir, spec.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        open_store(spec.bucket)
    except (ValueError, OSError, StoreError) as error:
        print(f"bucket-grpo agent: {error}", file=sys.stderr)
        return BAD_CONFIG
    listener = socket.socket(socket.AF_INET6 if ":" in spec.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.host, spec.port))
    except OSError as error:
        print(f"bucket-grpo agent: cannot listen on {spec.host}:{spec.port}: {error.strerror}", file=sys.stderr)
        return PORT_IN_USE
    return asyncio.run(serve(spec, listener, os.environ.get("BUCKET_GRPO_TOKEN") or None))


if __name__ == "__main__":
    sys.exit(main())
