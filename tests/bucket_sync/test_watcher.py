import pytest

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
