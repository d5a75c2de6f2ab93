"""HTTP to the agents. No redirect is followed, so a token never goes where it was not meant to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from pydantic import ValidationError

from bucket_grpo.bucket_sync.wire import AgentStatus, Wanted
from bucket_grpo.proxy.http_client import Answer, HttpClient, HttpError

CONNECT_TIMEOUT_S = 5.0


class UpstreamError(HttpError):
    """An agent could not be asked, or its answer makes no sense."""


class Agents:
    """No bound on connections: the router bounds the requests, a pool would only queue them."""

    def __init__(self, token: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._completions = HttpClient(self._headers, CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"User-Agent": "bucket-grpo-proxy", "Accept-Encoding": "identity", **self._headers},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        self._completions.close()
        await self._session.close()

    async def complete(self, url: str, body: bytes, timeout_s: float) -> Answer:
        """POST a completion and read the whole answer, whatever its status; raises `HttpError`."""
        return await self._completions.post(url, "/v1/completions", body, timeout_s)

    @asynccontextmanager
    async def stream(self, url: str, body: bytes, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.post(
                f"{url}/v1/completions",
                data=body,
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _upstream_error(error) from error

    async def status(self, url: str, after: int, wait_s: float) -> AgentStatus:
        """The agent's state, as soon as its `seq` passes `after`, or after `wait_s`; raises `UpstreamError`."""
        body = await self._control("GET", f"{url}/agent/status?after={after}&wait={wait_s:g}", None, wait_s + 5)
        return _parse_status(body)

    async def put_wanted(self, url: str, wanted: Wanted) -> AgentStatus:
        """State the whole wish; repeating it does no harm. Raises `UpstreamError`."""
        return _parse_status(await self._control("PUT", f"{url}/agent/wanted", wanted.model_dump_json().encode(), 10))

    async def get(self, url: str, path: str) -> bytes:
        """A 200's body of one of vLLM's own routes; raises `UpstreamError`."""
        return await self._control("GET", url + path, None, 10)

    async def _control(self, method: str, url: str, body: bytes | None, timeout_s: float) -> bytes:
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                headers={"Content-Type": "application/json"} if body else None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                data = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _upstream_error(error) from error
        if status in (401, 403):
            raise UpstreamError("the agent refuses the token: BUCKET_GRPO_TOKEN must be the same here and there")
        if status != 200:
            raise UpstreamError(
                f"{method} {url.split('?')[0]} answered {status}: {data[:200].decode(errors='replace')}"
            )
        return data


def _parse_status(body: bytes) -> AgentStatus:
    try:
        return AgentStatus.model_validate_json(body)
    except ValidationError as error:
        raise UpstreamError(f"what answers there is no agent of this release: {error}") from error


def _upstream_error(error: Exception) -> UpstreamError:
    if isinstance(error, asyncio.TimeoutError):
        return UpstreamError("no answer in time")
    return UpstreamError(
        f"{type(error).__name__}: {error}".removesuffix(": "), refused=isinstance(error, aiohttp.ClientConnectorError)
    )
