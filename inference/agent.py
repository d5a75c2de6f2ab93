"""The one port in front of vLLM: who may pass, the agent's own API, and an allowlist of what is passed on.

vLLM's own `--api-key` leaves `/adapters`, `/pause`, `/collective_rpc` and others open, so vLLM listens on loopback and
everything that is not named here is 404.
"""

import hmac
from typing import Annotated

import aiohttp
from fastapi import FastAPI, Query, Request, Response

from bucket_grpo.bucket_sync.wire import AgentStatus, Wanted
from bucket_grpo.inference.board import Board
from bucket_grpo.inference.hot_route import PATHS, HotRoute, Receive, Scope, Send, send_error
from bucket_grpo.inference.supervisor import Supervisor

MAX_WAIT_S = 60.0
PASSTHROUGH = ("/v1/models", "/server_info", "/metrics")
OPEN_PATHS = frozenset({"/health"})


class Agent:
    """The ASGI app. With a token, every route but `GET /health` needs `Authorization: Bearer <token>`."""

    def __init__(
        self, board: Board, supervisor: Supervisor, session: aiohttp.ClientSession, token: str | None = None
    ) -> None:
        self.hot = HotRoute(board, supervisor, session)
        self._app = control_api(board, supervisor, session)
        self._authorization = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._may_pass(scope):
            await send_error(send, 401, "unauthorized", "send 'Authorization: Bearer <token>' with this run's token")
        elif scope["path"] in PATHS and scope["method"] == "POST":
            await self.hot(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if self._authorization is None or (scope["method"] == "GET" and scope["path"] in OPEN_PATHS):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._authorization)


def control_api(board: Board, supervisor: Supervisor, session: aiohttp.ClientSession) -> FastAPI:
    app = FastAPI(title="bucket-grpo agent", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        """200 while vLLM can be used. Of a stalled engine vLLM itself would say 200."""
        return Response(status_code=200 if board.engine == "ready" else 503)

    @app.get("/agent/status")
    async def status(
        after: Annotated[int, Query()] = -1, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
    ) -> AgentStatus:
        await board.wait_beyond(after, wait)
        return board.status()

    @app.put("/agent/wanted")
    async def wanted(wish: Wanted) -> AgentStatus:
        board.want(wish)
        return board.status()

    async def passthrough(request: Request) -> Response:
        client = supervisor.client
        if client is None:
            return Response(f"vLLM is {board.engine}: {board.engine_reason or ''}", status_code=503)
        query = f"?{request.url.query}" if request.url.query else ""
        try:
            async with session.get(
                client.base_url + request.url.path + query, timeout=aiohttp.ClientTimeout(total=30)
            ) as answer:
                return Response(await answer.read(), status_code=answer.status, media_type=answer.content_type)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Response(f"vLLM did not answer: {error!r}", status_code=503)

    for path in PASSTHROUGH:
        app.add_api_route(path, passthrough, methods=["GET"])
    return app
