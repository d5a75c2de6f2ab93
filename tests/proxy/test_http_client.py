"""The hot route's own HTTP client, against servers that say exactly the bytes of the test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bucket_grpo.proxy.http_client import HttpClient, HttpError

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Server:
    """Answers the nth request with the nth of `answers` (the last one repeats); `b""` hangs up, None stays silent."""

    def __init__(self, *answers: bytes | None, hang_up_after: bool = False, piecewise: bool = False) -> None:
        self.answers, self.hang_up_after, self.piecewise = list(answers), hang_up_after, piecewise
        self.requests: list[bytes] = []
        self.connections = self.broken = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    await reader.read()
                    return
                for piece in [answer[i : i + 1] for i in range(len(answer))] if self.piecewise else [answer]:
                    writer.write(piece)
                    await writer.drain()
                if answer == b"" or self.hang_up_after:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.broken += 1
        finally:
            writer.close()


@asynccontextmanager
async def asked(server: Server) -> AsyncIterator[Callable]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/base"
    client = HttpClient({"Authorization": "Bearer secret"})
    try:
        yield lambda body=b"x", timeout_s=5.0: client.post(url, "/v1/completions", body, timeout_s)
    finally:
        client.close()
        listener.close()


async def test_the_request_is_whole_and_connections_are_kept() -> None:
    server = Server(OK)
    async with asked(server) as ask:
        for _ in range(5):
            answer = await ask(b'{"a": 1}')
            assert (answer.status, answer.content_type, answer.body) == (200, "application/json", b"{}")
    assert server.connections == 1
    head, body = server.requests[-1].split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret" in head
    assert body == b'{"a": 1}'


@pytest.mark.parametrize(
    "raw",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\nTrailer: 1\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    ],
)
@pytest.mark.parametrize("piecewise", [False, True])
async def test_every_framing_is_read_however_it_arrives(raw: bytes, piecewise: bool) -> None:
    async with asked(Server(raw, piecewise=piecewise, hang_up_after=b"close" in raw)) as ask:
        for _ in range(2):
            answer = await ask()
            assert (answer.status, answer.body) == (200, b"{}")


async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_unnoticed() -> None:
    server = Server(OK, hang_up_after=True)
    async with asked(server) as ask:
        for _ in range(5):
            assert (await ask()).status == 200
    assert server.connections == 5


async def test_a_kept_connection_that_is_closed_instead_of_an_answer_is_asked_anew() -> None:
    server = Server(OK, b"", OK)
    async with asked(server) as ask:
        assert (await ask()).status == 200
        assert (await ask()).status == 200
    assert (server.connections, len(server.requests)) == (2, 3)


@pytest.mark.parametrize(
    "raw", [b"", OK[:-1], b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", b"SSH-2.0\r\n\r\n", OK[:20]]
)
async def test_half_an_answer_is_none(raw: bytes) -> None:
    async with asked(Server(raw, hang_up_after=True)) as ask:
        with pytest.raises(HttpError):
            await ask()


async def test_silence_ends_with_the_timeout_and_breaks_the_connection_off() -> None:
    server = Server(None)
    async with asked(server) as ask:
        with pytest.raises(HttpError, match="no answer within"):
            await ask(timeout_s=0.2)


async def test_a_cancelled_request_breaks_its_connection_off_and_is_not_mixed_up_with_the_next() -> None:
    server = Server(None, OK)
    async with asked(server) as ask:
        call = asyncio.create_task(ask())
        while not server.requests:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await ask()).body == b"{}"
    assert server.connections == 2


async def test_nobody_there_is_told_apart_from_a_broken_answer() -> None:
    listener = await asyncio.start_server(Server(OK).handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    with pytest.raises(HttpError) as caught:
        await HttpClient({}).post(f"http://127.0.0.1:{port}", "/", b"", 5)
    assert caught.value.refused


async def test_many_at_once_never_share_a_connection() -> None:
    server = Server(OK)
    async with asked(server) as ask:
        answers = await asyncio.gather(*(ask(str(index).encode()) for index in range(100)))
        assert {answer.status for answer in answers} == {200}
        await asyncio.gather(*(ask() for _ in range(100)))
    assert server.connections == 100
