"""`python -m bucket_grpo.inference --config agent.json`: one replica, until SIGTERM or the end of its run.

Exit status: 0 stopped as asked; 2 the config is wrong; 3 the port is in use; 4 vLLM could not be kept running.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from bucket_grpo.bucket_sync.stores import StoreError, open_store
from bucket_grpo.inference.replica import run_replica
from bucket_grpo.inference.spec import ReplicaSpec
from bucket_grpo.runtime.processes import raise_file_limit

TOKEN_ENV = "BUCKET_GRPO_TOKEN"
BAD_CONFIG, PORT_IN_USE = 2, 3


def prepare(config: Path, token: str | None) -> ReplicaSpec:
    """The spec, once everything that can be known to be wrong before vLLM starts was looked at. Raises `ValueError`."""
    spec = ReplicaSpec.read(config)
    if token is None and not is_loopback(spec.host):
        raise ValueError(f"{config}: host {spec.host} can be reached by others: set {TOKEN_ENV} to a secret token")
    if spec.model.startswith(("/", "./", "../")) and not Path(spec.model, "config.json").is_file():
        raise ValueError(f"{config}: model {spec.model} is not a model's folder: it holds no config.json")
    try:
        for folder in (spec.staging_dir, spec.log_dir):
            folder.mkdir(parents=True, exist_ok=True)
        open_store(spec.bucket)
    except (OSError, StoreError) as error:
        raise ValueError(f"{config}: {error}") from error
    return spec


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bucket_grpo.inference", description="One vLLM replica and its agent."
    )
    parser.add_argument("--config", type=Path, required=True, help="a JSON file; its keys are ReplicaSpec's fields")
    arguments = parser.parse_args()
    raise_file_limit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    token = os.environ.get(TOKEN_ENV) or None
    try:
        spec = prepare(arguments.config, token)
    except ValueError as error:
        print(f"bucket-grpo agent: {error}", file=sys.stderr)
        return BAD_CONFIG
    listener = socket.socket(socket.AF_INET6 if ":" in spec.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.host, spec.port))
    except OSError as error:
        print(f"bucket-grpo agent: cannot listen on {spec.host}:{spec.port}: {error.strerror}", file=sys.stderr)
        return PORT_IN_USE
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        return runner.run(until_signalled(spec, listener, token))


async def until_signalled(spec: ReplicaSpec, listener: socket.socket, token: str | None) -> int:
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked.set)
    return await run_replica(spec, listener, token, asked)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (it is not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
