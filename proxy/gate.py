"""What stands before every route: who may ask, and how much they may send.

Also sends the hot route past the framework. Routes that are not listed in the app don't exist: nothing is forwarded
because of its path.
"""

import hmac

from bucket_grpo.proxy.asgi import App, BodyTooLarge, ClientGone, Message, Receive, Scope, Send, read_body, refuse

OPEN_PATHS = frozenset({"/health"})
COMPLETIONS_PATH = "/v1/completions"


class Gate:
    """Args:
    app: every route but the hot one.
    completions: the hot route, which reads its body itself.
    api_key: asked of every request but for `OPEN_PATHS`; None asks nobody.
    """

    def __init__(
        self, app: App, completions: App, *, api_key: str | None, max_header_bytes: int, max_body_bytes: int
    ) -> None:
        self._app, self._completions = app, completions
        self._expected = f"Bearer {api_key}".encode() if api_key else None
        self._max_header_bytes, self._max_body_bytes = max_header_bytes, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            await refuse(send, 431, f"the headers are larger than {self._max_header_bytes} bytes")
        elif self._expected is not None and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            await refuse(send, 401, "a bearer token is needed", [(b"www-authenticate", b"Bearer")])
        elif scope["path"] != COMPLETIONS_PATH:
            await self._control(scope, receive, send)
        elif scope["method"] != "POST":
            await refuse(send, 405, f"{COMPLETIONS_PATH} takes POST only", [(b"allow", b"POST")])
        else:
            await self._completions(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and self._expected is not None and hmac.compare_digest(given[0], self._expected)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A control route, with its body read before: the framework has no limit on it."""
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
        except BodyTooLarge:
            await refuse(send, 413, f"the body is larger than {self._max_body_bytes} bytes")
            return
        except ClientGone:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)
