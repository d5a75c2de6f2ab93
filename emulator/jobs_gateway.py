"""The way in to an exposed port of a job: only with a token that may read the job's namespace."""

import asyncio
import socket
from collections.abc import Callable

import aiohttp
from aiohttp import web

from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.tokens import TokenBook

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "te",
    "trailer",
    "upgrade",
    "proxy-authorization",
    "host",
}


class Gateway:
    """One exposed port of one job, at a port of its own of the Hub (the Hub gives it a host name of its own)."""

    def __init__(
        self, namespace: str, tokens: TokenBook, public: bool, cut_after_s: Callable[[], float | None]
    ) -> None:
        self._namespace = namespace
        self._tokens = tokens
        self._public = public
        self._cut_after_s = cut_after_s
        self._target = ""
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    @staticmethod
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    async def open(self, address: str, target_host: str, target_port: int) -> str:
        """Listen on a free port of `address`; returns the URL."""
        self._target = f"http://{target_host}:{target_port}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, address, 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def close(self) -> None:
        if self._session:
            await self._session.close()
        if self._runner:
            await self._runner.cleanup()

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._public:
            return None
        try:
            identity = self._tokens.identify(request.headers.get("Authorization"))
        except HubError:
            identity = None
        if identity is None:
            return web.json_response({"error": "this port needs a token with read access to the namespace"}, status=401)
        if not identity.owns(self._namespace):
            return web.json_response({"error": f"no access to jobs of {self._namespace}"}, status=403)
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refusal(request):
            return refusal
        try:
            async with asyncio.timeout(self._cut_after_s()):
                return await self._pass(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=504, text="the gateway cut the request (fault on demand)")
        except aiohttp.ClientConnectorError:
            return web.json_response({"error": "nothing listens on this port of the job (yet)"}, status=502)
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"the job dropped the request: {error}"}, status=502)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            request.method,
            self._target + request.raw_path,
            headers=headers,
            data=await request.read(),
            allow_redirects=False,
        ) as upstream:
            answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
            for key, value in upstream.headers.items():
                if key.lower() not in _HOP_BY_HOP:
                    answer.headers.add(key, value)
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer
