"""Who may ask what: keys, tokens, the allowlist, and the limits on what is sent."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from fake_agent import FakeAgent
from proxy_harness import INCARNATION, RUN, body, proxy_for

from bucket_grpo.proxy.config import ProxyConfig, Secrets, check_exposure

KEY, TOKEN = "key-4f1c", "token-93ab"
SECRETS = Secrets(api_key=KEY, agent_token=TOKEN)
AUTH = {"Authorization": f"Bearer {KEY}"}
anyio = pytest.mark.anyio


def config_on(host: str, tmp_path: Path) -> ProxyConfig:
    return ProxyConfig(run=RUN, incarnation=INCARNATION, base_model="tiny", journal_dir=tmp_path, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_no_key_is_needed(host: str, tmp_path: Path) -> None:
    check_exposure(config_on(host, tmp_path), Secrets())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "trainer.example", ""])
def test_where_others_can_reach_it_the_proxy_does_not_start_without_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BUCKET_GRPO_API_KEY"):
        check_exposure(config_on(host, tmp_path), Secrets())
    check_exposure(config_on(host, tmp_path), SECRETS)


def test_secrets_do_not_show_in_their_repr() -> None:
    assert KEY not in repr(SECRETS)
    assert TOKEN not in repr(SECRETS)


@anyio
async def test_every_route_but_health_needs_exactly_the_key(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a", token=TOKEN)], tmp_path, secrets=SECRETS) as proxy:
        wrong = [{}, {"Authorization": KEY}, {"Authorization": f"bearer {KEY}"}, {"Authorization": f"Bearer {KEY} "}]
        wrong += [{"Authorization": "Bearer "}, {"Authorization": f"Bearer {TOKEN}"}]
        for headers in wrong[:3] + wrong[4:]:
            for method, path in [("GET", "/status"), ("GET", "/metrics"), ("POST", "/v1/completions"), ("PUT", "/x")]:
                async with proxy.session.request(method, proxy.url + path, headers=headers) as response:
                    assert response.status == 401, (method, path, headers)
        two = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
        async with proxy.session.get(proxy.url + "/status", headers=two) as response:
            assert response.status == 401
        assert (await proxy.get("/health"))[0] in (200, 503)
        assert (await proxy.get("/status", headers=AUTH))[0] == 200


@anyio
async def test_agents_are_asked_with_their_own_token(tmp_path: Path) -> None:
    agent = FakeAgent("a", token=TOKEN)
    async with proxy_for([agent], tmp_path, secrets=SECRETS, headers=AUTH) as proxy:
        await proxy.live(1)
        assert (await proxy.complete(1))[0] == 200


@anyio
async def test_an_agent_that_refuses_the_token_is_named(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a", token="another")], tmp_path, secrets=SECRETS, headers=AUTH) as proxy:
        await asyncio.sleep(1)
        reason = (await proxy.status())["replicas"][0]["reason"]
        assert "BUCKET_GRPO_TOKEN" in reason


@anyio
async def test_neither_key_nor_token_shows_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    agents = [FakeAgent("a", token=TOKEN), FakeAgent("b", token="another")]
    shown = []
    async with proxy_for(agents, tmp_path, secrets=SECRETS, headers=AUTH) as proxy:
        await proxy.live(1)
        for path in ("/status", "/metrics", "/versions", "/server_info", "/v1/models", "/replicas", "/nowhere"):
            shown.append(str(await proxy.get(path)))
        shown.append(str(await proxy.complete(7)))
        await agents[0].stop()
        shown.append(str(await proxy.post("/v1/completions", data=b"{")))
        await asyncio.sleep(0.5)
        shown.append(str(await proxy.get("/status")))
    shown.append(caplog.text)
    shown += [path.read_text() for path in (tmp_path / "journal").iterdir()]
    for text in shown:
        assert KEY not in text
        assert TOKEN not in text


VLLMS_OWN = ["/collective_rpc", "/adapters", "/invocations", "/v1/chat/completions", "/sleep", "/reset_prefix_cache"]
TRLS_MERGED_SYNC = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
NEAR_MISSES = ["/v1/completions/", "//v1/completions", "/V1/completions", "/v1/completions%2f", "/v1/../adapters"]
OTHERS = ["/docs", "/openapi.json", "/agent/wanted"]


@anyio
@pytest.mark.parametrize("path", [*VLLMS_OWN, *TRLS_MERGED_SYNC, *NEAR_MISSES, *OTHERS])
async def test_what_is_not_on_the_list_reaches_no_replica(tmp_path: Path, path: str) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        for method in ("GET", "POST", "PUT", "DELETE"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
            raw = json.dumps(body(1)).encode()
            writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode())
            writer.write(f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            assert (await reader.readline()).split()[1] in (b"404", b"405", b"307"), (method, path)
            writer.close()
        assert agent.bodies == []


@anyio
async def test_wrong_methods_on_listed_routes_are_refused(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        for method, path in [("GET", "/v1/completions"), ("PUT", "/pause"), ("GET", "/pause"), ("DELETE", "/versions")]:
            async with proxy.session.request(method, proxy.url + path) as response:
                assert response.status == 405


@anyio
async def test_too_large_a_body_or_header_is_refused_while_the_rest_goes_on(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path, max_body_bytes=5000, max_header_bytes=4000) as proxy:
        await proxy.live(1)
        assert (await proxy.complete(1, list(range(5000))))[0] == 413

        async def endless():
            for _ in range(100):
                yield b"x" * 1000

        assert (await proxy.post("/v1/completions", data=endless()))[0] == 413
        assert (await proxy.get("/status", headers={"X-Long": "x" * 5000}))[0] == 431
        assert (await proxy.post("/versions", data=b"x" * 6000))[0] == 413
        assert (await proxy.complete(1))[0] == 200


@anyio
@pytest.mark.parametrize("piece", [b"x" * 65536, b"X-A: b\r\n" * 8192], ids=["one header", "many headers"])
async def test_endless_headers_are_cut_off(tmp_path: Path, piece: bytes) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        _, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-First: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(piece)
                await writer.drain()
                sent += 1
        writer.close()
        assert sent < 1000
        raw = json.dumps({"model": "tiny", "prompt": [7] * 200_000}).encode()
        assert (await proxy.post("/v1/completions", data=raw))[0] == 200, "a long body is no header"


@anyio
async def test_no_redirect_is_followed_with_a_token(tmp_path: Path) -> None:
    followed = []

    async def trap(request: web.Request) -> web.Response:
        followed.append(request.headers.get("Authorization"))
        return web.Response(status=200)

    async def serve(handler: Callable) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    def redirected() -> web.Response:
        return web.Response(status=307, headers={"Location": f"{trap_url}/x"})

    async def redirect(_request: web.Request) -> web.Response:
        return redirected()

    trap_runner, trap_url = await serve(trap)
    lure_runner, lure_url = await serve(redirect)
    agents = [FakeAgent("a", token=TOKEN, misbehave=lambda _: redirected())]
    await agents[0].start()
    async with proxy_for(agents, tmp_path, secrets=SECRETS, headers=AUTH, max_attempts=2) as proxy:
        await proxy.put("/replicas", {"urls": [agents[0].url, lure_url]})
        await proxy.live(1)
        assert (await proxy.complete(1))[0] == 503
        await asyncio.sleep(0.5)
        assert "answered 307" in (await proxy.status())["replicas"][1]["reason"]
    await trap_runner.cleanup()
    await lure_runner.cleanup()
    assert followed == []


@anyio
async def test_missing_empty_and_doubled_models_reach_no_replica(tmp_path: Path) -> None:
    agent = FakeAgent("a")
    async with proxy_for([agent], tmp_path) as proxy:
        await proxy.live(1)
        for raw in (b'{"prompt":[1]}', b'{"model":"","prompt":[1]}', b'{"model":null}', b'{"model":"tiny","model":""}'):
            assert (await proxy.post("/v1/completions", data=raw))[0] == 400
        assert (await proxy.post("/v1/completions", {"model": "gpt-4", "prompt": [1]}))[0] == 404
        assert agent.bodies == []
        assert (await proxy.post("/v1/completions", {"model": "tiny", "prompt": [1]}))[0] == 200


@anyio
async def test_replica_urls_with_credentials_or_other_schemes_are_refused(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        for url in ("file:///etc/passwd", "http://user:secret@host", "ftp://x", "http://", "x"):
            assert (await proxy.put("/replicas", {"urls": [url]}))[0] == 400


@anyio
async def test_slow_clients_hold_up_nobody(tmp_path: Path) -> None:
    async with proxy_for([FakeAgent("a")], tmp_path) as proxy:
        await proxy.live(1)
        port = int(proxy.url.rsplit(":", 1)[1])
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(2):
            assert (await proxy.complete(1))[0] == 200
        for _, writer in slow:
            writer.close()
