"""An emulated Hugging Face Hub on this machine: buckets, the CAS behind their uploads, accounts and tokens.

The released client and the `hf` command work against it with only `HF_ENDPOINT` and a token set. Everything is kept
under one folder; a killed server goes on from there.
"""

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import IO

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from bucket_grpo.emulator import hub_cas, hub_control, hub_routes, jobs_api
from bucket_grpo.emulator.events import ChangeLog, Feed
from bucket_grpo.emulator.hub_buckets import Buckets
from bucket_grpo.emulator.hub_database import Database
from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.hub_faults import Fault, FaultBook, FaultMiddleware
from bucket_grpo.emulator.jobs_runner import JobOptions, JobRunner
from bucket_grpo.emulator.objects import ObjectStore
from bucket_grpo.emulator.tokens import TOKENS_FILE, TokenBook

CAS_TOKEN_LIFETIME_S = 3600.0


class HubInUse(RuntimeError):
    """Another server works on the same folder."""


class Hub:
    """The parts of one emulated Hub, over one folder. `close` gives the folder free."""

    def __init__(
        self,
        root: Path,
        *,
        users: Sequence[str] = ("me",),
        orgs: Sequence[str] = (),
        faults: Sequence[Fault] = (),
        event_buffer: int = 10_000,
        event_session_s: float = 1800,
        cas_token_lifetime_s: float = CAS_TOKEN_LIFETIME_S,
        jobs: JobOptions | None = None,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(root)
        self.tokens = TokenBook(root, users, orgs)
        self.database = Database(root / "hub.sqlite")
        self.objects = ObjectStore(root, self.database)
        self.log = ChangeLog(self.database, event_buffer)
        self.feed = Feed(self.log, event_session_s)
        self.buckets = Buckets(self.database, self.objects, self.log, self._changed)
        self.faults = FaultBook(list(faults))
        self.cas_token_lifetime_s = cas_token_lifetime_s
        self.jobs = JobRunner(root, self.tokens, jobs)

    def _changed(self) -> None:
        self.feed.ring()

    def close(self) -> None:
        self.database.close()
        self._lock.close()


def _lock(root: Path) -> IO[str]:
    lock = (root / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise HubInUse(f"another emulated Hub runs on {root}: stop it, or choose another --root") from error
    return lock


def create_app(hub: Hub) -> Starlette:
    """The ASGI application that serves `hub`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        hub.feed.attach(asyncio.get_running_loop())
        pending = asyncio.create_task(_apply_pending(hub))
        yield
        pending.cancel()
        await hub.jobs.close()

    def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HubError)
        return error.response()

    def refuse_unknown(request: Request, error: Exception) -> Response:
        """The Hub says 404 also where a path is known, but not with this method."""
        return HubError(404, f"no route {request.method} {request.url.path} on the emulated Hub").response()

    app = Starlette(
        routes=[*hub_routes.routes(), *hub_cas.routes(), *hub_control.routes(), *jobs_api.routes()],
        middleware=[Middleware(FaultMiddleware, book=hub.faults)],
        exception_handlers={HubError: refuse, 404: refuse_unknown, 405: refuse_unknown},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.hub = hub
    return app


async def _apply_pending(hub: Hub) -> None:
    """Bring hidden commits to light when they are due."""
    while True:
        wait_s = await run_in_threadpool(hub.buckets.apply_due)
        await asyncio.sleep(0.05 if wait_s is None else min(wait_s, 0.05))


class HubServer(uvicorn.Server):
    """uvicorn, which also tells the open event streams to reconnect when it is asked to stop."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hub.feed.close()
        self._hub.jobs.closing = True
        # uvicorn's own handler would raise the signal again once all is done: a stop that was asked for ends with 0.
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    root: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    users: Sequence[str] = ("me",),
    orgs: Sequence[str] = (),
    faults: Sequence[str] = (),
    jobs: JobOptions | None = None,
) -> None:
    """Serve the Hub under `root` until SIGTERM or SIGINT. `port` 0 takes a free one; `faults` are JSON objects.

    Prints `serving URL` once requests are answered. Raises `HubInUse`, or `OSError` for a port that is taken.
    """
    hub = Hub(
        root.absolute(), users=users, orgs=orgs, faults=[Fault.model_validate_json(text) for text in faults], jobs=jobs
    )
    listener = socket.create_server((host, port))
    for_jobs = hub.jobs.open(listener.getsockname()[1])
    url = f"http://{host}:{listener.getsockname()[1]}"
    print(f"tokens {root.absolute() / TOKENS_FILE}", flush=True)
    if hub.jobs.why_plain:
        print(f"jobs run as plain processes with mapped ports and paths: {hub.jobs.why_plain}", flush=True)
    print(f"serving {url}", flush=True)
    config = uvicorn.Config(
        create_app(hub),
        log_level=os.environ.get("BUCKET_GRPO_HUB_LOG", "warning"),
        timeout_graceful_shutdown=3,
        # uvicorn's own can be seconds old on a busy machine; where clients read it, the route says it.
        date_header=False,
    )
    try:
        HubServer(config, hub).run(sockets=[listener, *for_jobs])
    finally:
        hub.close()
