"""The routes: TRL's HTTP contract with one vLLM server, and our own on versions and state."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException as StarletteHTTPException

from bucket_grpo.bucket_sync.vocabulary import VersionRef
from bucket_grpo.bucket_sync.wire import VersionLiveness
from bucket_grpo.proxy.completions import Completions
from bucket_grpo.proxy.config import ProxyConfig, Secrets, check_replica_urls
from bucket_grpo.proxy.fleet_state import VersionConflict
from bucket_grpo.proxy.gate import Gate
from bucket_grpo.proxy.metrics import registry_for
from bucket_grpo.proxy.publishing import Publishing
from bucket_grpo.proxy.server_info import ReplicasDiffer, ServerInfo
from bucket_grpo.proxy.service import Service

MAX_WAIT_S = 60.0
log = logging.getLogger(__name__)


class AdapterRequest(BaseModel):
    """TRL's body of load and unload; other keys of vLLM's are let through."""

    lora_name: str
    lora_path: str | None = None


class Replicas(BaseModel):
    model_config = ConfigDict(extra="forbid")

    urls: list[str]


def build_app(config: ProxyConfig, secrets: Secrets) -> Gate:
    """The whole proxy as one ASGI app; its service starts and ends with the app's lifespan."""
    service = Service(config, secrets)
    publishing = Publishing(service)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        recovery = asyncio.create_task(publishing.recover(), name="recover")
        try:
            yield
        finally:
            recovery.cancel()
            await asyncio.gather(recovery, return_exceptions=True)
            await service.close()

    app = FastAPI(title="bucket-grpo proxy", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_trl_routes(app, service, publishing)
    _add_own_routes(app, service)
    _add_error_shapes(app)
    return Gate(
        app,
        Completions(service),
        api_key=secrets.api_key,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
    )


def _add_trl_routes(app: FastAPI, service: Service, publishing: Publishing) -> None:
    fleet, info = service.fleet, ServerInfo(service)

    @app.get("/health")
    async def health() -> Response:
        """200 once one replica can answer for the base model."""
        if fleet.ready_on(None):
            return Response(status_code=200)
        return JSONResponse({"error": {"message": fleet.why_not_ready(None), "code": 503}}, status_code=503)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """vLLM's own description, with the smallest of each limit over the replicas."""
        return await info.server_info()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return await info.models()

    @app.post("/pause")
    @app.post("/resume")
    async def acknowledged() -> dict[str, str]:
        """TRL pauses around a weight sync. A version under a new name needs none, so nothing stops."""
        return {"status": "ok"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": False}

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: AdapterRequest) -> Response:
        number = fleet.number_of(request.lora_name)
        if number is None:
            raise HTTPException(
                400, f"{request.lora_name!r} is not a version name such as {service.config.lora_name}-v3"
            )
        if request.lora_path is None:
            raise HTTPException(400, "lora_path is missing")
        await publishing.publish(number, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: AdapterRequest) -> Response:
        """TRL needs a version no more. Unknown names are a success: there is nothing to unload."""
        number = fleet.number_of(request.lora_name)
        if number is not None:
            service.unload(number)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _add_own_routes(app: FastAPI, service: Service) -> None:
    fleet = service.fleet
    registry = registry_for(service)

    @app.post("/versions", status_code=202)
    async def announce(ref: VersionRef) -> VersionLiveness:
        """A version is in the bucket: have it loaded. Repeating it does no harm."""
        try:
            service.accept(ref)
        except VersionConflict as conflict:
            raise HTTPException(409, str(conflict)) from conflict
        return _liveness(service, ref.name)

    @app.get("/versions")
    async def versions() -> list[VersionLiveness]:
        return [liveness for number in sorted(fleet.versions) if (liveness := fleet.liveness(number)) is not None]

    @app.get("/versions/{name}")
    async def liveness(name: str, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> VersionLiveness:
        """How a version stands; with `wait` (seconds), answers as soon as it is no longer pending."""
        deadline = time.monotonic() + wait
        while True:
            found = _liveness(service, name)
            if found.state != "pending" or not await service.changed.wait(deadline - time.monotonic()):
                return found

    @app.get("/replicas")
    async def replicas() -> Replicas:
        return Replicas(urls=list(fleet.replicas))

    @app.put("/replicas")
    async def put_replicas(wish: Replicas) -> Replicas:
        """Route to exactly these agents from now on."""
        try:
            service.set_replicas(check_replica_urls(wish.urls))
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        return Replicas(urls=list(fleet.replicas))

    @app.get("/status")
    async def status() -> dict[str, object]:
        return service.status()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)


def _liveness(service: Service, name: str) -> VersionLiveness:
    number = service.fleet.number_of(name)
    found = service.fleet.liveness(number) if number is not None else None
    if found is None:
        raise HTTPException(404, f"{name!r} was not announced to this proxy")
    return found


def _add_error_shapes(app: FastAPI) -> None:
    def shaped(status: int, reason: str) -> JSONResponse:
        return JSONResponse({"error": {"message": reason, "code": status}}, status_code=status)

    @app.exception_handler(StarletteHTTPException)
    async def refused(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        return shaped(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return shaped(400, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")

    @app.exception_handler(ReplicasDiffer)
    async def differ(_request: Request, error: ReplicasDiffer) -> JSONResponse:
        log.error("%s", error)
        return shaped(503, str(error))
