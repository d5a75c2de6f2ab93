"""News of a bucket without asking: the Hub's `/events` feed, followed in a thread.

The feed is the second of two signals; the first is the proxy's hint. Neither is trusted for content: they only say
when it is worth looking. A mount is never listed for news (its listing is up to 30 s old).
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

import httpx
from huggingface_hub.utils import build_hf_headers

from bucket_grpo.bucket_sync.hub_store import HubStore

log = logging.getLogger(__name__)

# A silent feed shows that it is alive every 30 s.
SILENCE_S = 75.0
PAUSE_S = (0.5, 15.0)
REFUSED = frozenset({400, 401, 403, 404})


class FeedRefused(Exception):
    """The Hub does not let us follow the bucket: wrong token, no such bucket."""


class Change(NamedTuple):
    path: str
    op: str  # "add", "update", "delete" …


class FeedEvent(NamedTuple):
    """`reset`: changes were missed, look at everything anew. `cursor` resumes strictly behind this event."""

    kind: Literal["ready", "changes", "reset", "reconnect"]
    cursor: str | None
    changes: tuple[Change, ...] = ()


def parse_feed(lines: Iterable[str]) -> Iterator[FeedEvent]:
    """Server-sent events to `FeedEvent`s; kinds that we do not know are left out. Raises `ValueError` for bad JSON."""
    kind, data = "", ""
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                kind = value
            elif name == "data":
                data += value
            continue
        if kind in ("ready", "changes", "reset", "reconnect"):
            payload = json.loads(data or "{}")
            changes = tuple(Change(change["path"], change.get("op", "")) for change in payload.get("changes", ()))
            yield FeedEvent(kind, payload.get("cursor"), changes)  # type: ignore[arg-type]
        kind, data = "", ""


class BucketWatcher:
    """Follows one bucket until closed; reconnects where it left off, with a growing pause while the Hub is away.

    Args:
        on_change: called from the watcher's thread with each changed key.
        on_reset: called when changes may have been missed (also once at the start): look at everything anew.
    """

    def __init__(self, store: HubStore, on_change: Callable[[Change], None], on_reset: Callable[[], None]) -> None:
        self._store = store
        self._on_change, self._on_reset = on_change, on_reset
        self._cursor: str | None = None
        self._closing = threading.Event()
        self._socket: socket.socket | None = None
        self.connects = 0
        self.failure: Exception | None = None
        self._client = httpx.Client(timeout=httpx.Timeout(10.0, read=SILENCE_S), follow_redirects=False)
        self._thread = threading.Thread(target=self._run, name="bucket-watcher", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        self._closing.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the other side was quicker
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread from its read
        self._thread.join(timeout)
        self._client.close()

    def _run(self) -> None:
        pause_s, longest_s = PAUSE_S
        while not self._closing.is_set():
            try:
                for event in self._session():
                    pause_s = PAUSE_S[0]
                    self._take(event)
                    if event.kind in ("reset", "reconnect"):
                        break
                else:
                    self._closing.wait(pause_s)
            except FeedRefused as error:
                log.error("%s", error)
                self.failure = error
                return
            except (httpx.HTTPError, httpx.StreamError, ValueError, RuntimeError) as error:
                if self._closing.is_set():
                    return
                log.warning("the feed of %r broke, connecting again in %.1f s: %s", self._store, pause_s, error)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _take(self, event: FeedEvent) -> None:
        if event.kind == "reset" or self._cursor is None:
            self._on_reset()
        self._cursor = None if event.kind == "reset" else event.cursor or self._cursor
        for change in event.changes:
            self._on_change(Change(self._store.key_of(change.path), change.op))

    def _session(self) -> Iterator[FeedEvent]:
        api = self._store.api
        url = f"{api.endpoint}/api/buckets/{self._store.bucket_id}/events"
        params = {"cursor": self._cursor} if self._cursor else {}
        self.connects += 1
        with self._client.stream("GET", url, params=params, headers=build_hf_headers(token=api.token)) as answer:
            if answer.status_code in REFUSED:
                answer.read()
                raise FeedRefused(f"{self._store!r} cannot be followed: HTTP {answer.status_code} {answer.text[:200]}")
            answer.raise_for_status()
            self._socket = answer.extensions["network_stream"].get_extra_info("socket")
            yield from parse_feed(answer.iter_lines())
