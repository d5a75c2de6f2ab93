"""`python -m bucket_grpo.proxy --config proxy.json [--fd N]`: serve until SIGTERM.

With `--fd` it serves on a listening socket that its parent holds, so that a restarted proxy misses no connection.
"""

import argparse
import json
import logging
import socket
import sys
from pathlib import Path

import uvicorn
from pydantic import ValidationError

from bucket_grpo.proxy.app import build_app
from bucket_grpo.proxy.config import ProxyConfig, Secrets, check_exposure, load_config
from bucket_grpo.proxy.http_server import BoundedHttpProtocol
from bucket_grpo.runtime.processes import raise_file_limit

BACKLOG = 2048


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.proxy", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file; see bucket_grpo.proxy.config")
    parser.add_argument("--fd", type=int, help="serve on this inherited listening socket")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    arguments = parser.parse_args(argv)
    raise_file_limit()
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = load_config(arguments.config)
        secrets = Secrets.from_env()
        check_exposure(config, secrets)
        config.journal_dir.mkdir(parents=True, exist_ok=True)
        listener = _listen(config, arguments.fd)
    except (OSError, json.JSONDecodeError, ValidationError, ValueError) as error:
        print(f"proxy: {arguments.config}: {error}", file=sys.stderr)
        return 2
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(config, secrets),
            log_level=arguments.log_level,
            access_log=False,
            http=BoundedHttpProtocol,
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            backlog=BACKLOG,
        )
    )
    print(f"proxy listening on http://{config.host}:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def _listen(config: ProxyConfig, fd: int | None) -> socket.socket:
    """The listening socket: the inherited one, or a new one."""
    if fd is not None:
        listener = socket.socket(fileno=fd)
    else:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.host, config.port))
        except OSError as error:
            raise OSError(f"can't listen on {config.host}:{config.port}: {error.strerror}") from error
        listener.listen(BACKLOG)
    # Accepted sockets inherit it. Without it headers and body, two writes, wait 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


if __name__ == "__main__":
    sys.exit(main())
