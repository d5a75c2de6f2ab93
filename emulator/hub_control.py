"""The emulator's own routes under `/_emulator`: health, and, for the admin token on loopback, faults and garbage."""

import uuid

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bucket_grpo.emulator.hub_cas import hub_of
from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.hub_faults import Fault

LOOPBACK = ("127.0.0.1", "::1")


def require_admin(request: Request) -> None:
    if request.client is None or request.client.host not in LOOPBACK:
        raise HubError(403, "the emulator is controlled from its own machine only")
    if not hub_of(request).tokens.is_admin(request.headers.get("authorization")):
        raise HubError(401, "the emulator's admin token is needed: it is in tokens.json under --root")


def health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def faults(request: Request) -> Response:
    require_admin(request)
    book = hub_of(request).faults
    if request.method == "POST":
        try:
            book.add(Fault.model_validate_json(await request.body()))
        except ValidationError as error:
            raise HubError(400, f"not a fault: {error}") from error
    elif request.method == "DELETE":
        book.clear()
    return JSONResponse([fault.model_dump() for fault in book.in_force()])


async def collect_garbage(request: Request) -> Response:
    """Remove content that no bucket names; `older_than_s` spares uploads that are still to be named."""
    require_admin(request)
    hub = hub_of(request)
    older_than_s = float(request.query_params.get("older_than_s", 3600))
    removed = await run_in_threadpool(hub.objects.collect_garbage, older_than_s)
    if removed:
        # Clients remember which chunks this store has; a store with a new id is one they know nothing of.
        hub.database.set_setting("store_id", uuid.uuid4().hex[:12])
    return JSONResponse({"xorbs_removed": removed})


def routes() -> list[Route]:
    return [
        Route("/_emulator/health", health),
        Route("/_emulator/faults", faults, methods=["GET", "POST", "DELETE"]),
        Route("/_emulator/garbage", collect_garbage, methods=["DELETE"]),
    ]
