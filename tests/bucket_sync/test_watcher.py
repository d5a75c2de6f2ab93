import threading
import time

import pytest

from bucket_grpo.bucket_sync.arrivals import Arrivals
from bucket_grpo.bucket_sync.watcher import Change, FeedEvent, parse_feed


def test_events_comments_and_unknown_kinds():
    lines = [
        ": ping",
        "",
        "event: ready",
        'data: {"cursor": "c4"}',
        "",
        "event: weather",
        "data: {}",
        "",
        "event: changes",
        'data: {"cursor": "c5",',
        'data: "changes": [{"path": "a/b", "op": "add"}, {"path": "c", "op": "delete"}]}',
        "",
        "event: reconnect",
        "data: {}",
        "",
        "event: changes",
    ]
    assert list(parse_feed(lines)) == [
        FeedEvent("ready", "c4"),
        FeedEvent("changes", "c5", (Change("a/b", "add"), Change("c", "delete"))),
        FeedEvent("reconnect", None),
    ]


def test_a_feed_that_is_not_json_is_an_error():
    with pytest.raises(ValueError):
        list(parse_feed(["event: changes", "data: {", ""]))


def test_whoever_waits_for_a_key_is_woken_by_it_and_by_a_gap_in_the_feed():
    arrivals = Arrivals()
    for tell in (lambda: arrivals.add(Change("run/a", "add")), arrivals.missed_some):
        threading.Timer(0.05, tell).start()
        started = time.monotonic()
        assert arrivals.wait("run/a", timeout_s=5)
        assert time.monotonic() - started < 2


def test_other_keys_deletions_and_earlier_news_wake_nobody():
    arrivals = Arrivals()
    arrivals.add(Change("run/a", "add"))
    threading.Timer(0.05, lambda: arrivals.add(Change("run/b", "add"))).start()
    threading.Timer(0.05, lambda: arrivals.add(Change("run/a", "delete"))).start()
    assert not arrivals.wait("run/a", timeout_s=0.3)
