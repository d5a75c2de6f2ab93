"""A small HTTP/1.1 client for the hot route: one POST at a time on a kept-alive connection, whole answers only.

It exists for its cost: aiohttp's client took more time for a completion than all the rest of the proxy. What it
leaves out on purpose: redirects, cookies, compression, pipelining, a bound on connections. Streams and control calls
go through aiohttp.
"""

import asyncio
import errno
import ssl
from collections import deque
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

MAX_ANSWER_BYTES = 256 << 20
OUR_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
KEEP_IDLE_S = 60.0


class HttpError(Exception):
    """No whole answer came. `refused`: nobody listens there."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class StaleConnection(HttpError):
    """A kept-alive connection had been closed meanwhile: not a byte of an answer came, so asking again is safe."""


@dataclass(slots=True)
class Answer:
    status: int
    content_type: str
    body: bytes


class Connection(asyncio.Protocol):
    """One connection; `ask` it only when `idle`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._reused = self._began = False
        self.closed = False
        self.idle_since = 0.0

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        self._answer = asyncio.get_running_loop().create_future()
        self._began = False
        self._content_type = ""
        self._parts: list[bytes] = []
        self._size = 0
        self._transport.write(request)
        return self._answer

    def abort(self) -> None:
        """Give up the answer: the other side sees the connection break, and can stop working on it."""
        self._answer = None
        self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._began = True
        if self._answer is None:
            self._transport.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError(f"what came back is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reused and not self._began:
            self._fail(StaleConnection("the connection was closed while it was idle"))
        else:
            self._fail(HttpError(f"the connection broke before the answer was whole: {exc or 'closed'}"))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)
        if self._size > MAX_ANSWER_BYTES:
            self._fail(HttpError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes"))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return  # 100 Continue and the like: the answer is still to come
        answer, self._answer, self._reused = self._answer, None, True
        if not self._parser.should_keep_alive():
            self.closed = True
            self._transport.close()
        if answer is not None and not answer.done():
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            answer.set_result(Answer(status, self._content_type, body))

    def _fail(self, error: HttpError) -> None:
        answer, self._answer, self.closed = self._answer, None, True
        self._transport.abort()
        if answer is not None and not answer.done():
            answer.set_exception(error)


class Host:
    """The connections to one base URL."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path
        self._idle: deque[Connection] = deque()
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def request(self, path: str, body: bytes) -> bytes:
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def connection(self, connect_timeout_s: float) -> Connection:
        """An idle one if there is any, else a new one; raises `HttpError`."""
        loop = asyncio.get_running_loop()
        while self._idle:
            kept = self._idle.pop()
            if not kept.closed and loop.time() - kept.idle_since < KEEP_IDLE_S:
                return kept
            if not kept.closed:
                kept.abort()
        try:
            async with asyncio.timeout(connect_timeout_s):
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise HttpError(f"no connection within {connect_timeout_s:g} s", refused=True) from error
        except OSError as error:
            # Running out of files or memory here says nothing about the replica.
            raise HttpError(f"can't connect: {error}", refused=error.errno not in OUR_OWN_LIMITS) from error
        return connection

    def keep(self, connection: Connection) -> None:
        if not connection.closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()


class HttpClient:
    def __init__(self, headers: dict[str, str], connect_timeout_s: float = 5.0) -> None:
        self._headers, self._connect_timeout_s = headers, connect_timeout_s
        self._hosts: dict[str, Host] = {}

    async def post(self, url: str, path: str, body: bytes, timeout_s: float) -> Answer:
        """The whole answer, whatever its status; raises `HttpError`. Cancelling it breaks the connection off."""
        host = self._hosts.get(url)
        if host is None:
            host = self._hosts[url] = Host(url, self._headers)
        request = host.request(path, body)
        while True:
            connection = await host.connection(self._connect_timeout_s)
            answer = connection.ask(request)
            timer = asyncio.get_running_loop().call_later(timeout_s, _time_out, answer, timeout_s)
            try:
                result = await answer
            except StaleConnection:
                continue
            except BaseException:
                connection.abort()
                raise
            finally:
                timer.cancel()
            host.keep(connection)
            return result

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def _time_out(answer: "asyncio.Future[Answer]", timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(HttpError(f"no answer within {timeout_s:.0f} s"))
