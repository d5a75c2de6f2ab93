"""What stands before every route: who may ask, and how much they may send.

Also sends the hot route past the framework. Routes that are not listed in the app don't exist: nothing is forwarded
because of its path.
"""

import hmac

from bucket_grpo.proxy.asgi import App, Receive, Scope, Send, refuse

OPEN_PATHS = frozenset({"/health"})


class Gate:
    def __init__(self, app: App, completions: App, *, api_key: str | None, max_header_bytes: int) -> None:
        self._app, self._completions = app, completions
        self._expected = f"Bearer {api_key}".encode() if api_key else None
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._max_header_bytes:
            await refuse(send, 431, f"the headers are larger than {self._max_header_bytes} bytes")
        elif self._expected is not None and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            await refuse(send, 401, "a bearer token is needed", [(b"www-authenticate", b"Bearer")])
        elif scope["path"] == "/v1/completions" and scope["method"] == "POST":
            await self._completions(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and self._expected is not None and hmac.compare_digest(given[0], self._expected)
