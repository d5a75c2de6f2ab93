"""When a mount sends what was closed: debounce, batch window, one upload at a time."""

from hypothesis import given
from hypothesis import strategies as st

from bucket_grpo.emulator.mount_flush import FlushSchedule
from bucket_grpo.emulator.profiles import PROFILES

HF = PROFILES["hf-mount-2026-09"]


def schedule() -> FlushSchedule[str]:
    return FlushSchedule(HF.flush_debounce_s, HF.flush_window_s)


def test_a_closed_file_waits_two_seconds() -> None:
    flush = schedule()
    flush.signal(10.0, "a")
    assert flush.take(11.99) is None
    assert flush.take(12.0) == ["a"]


def test_files_closed_within_one_debounce_go_out_together() -> None:
    flush = schedule()
    flush.signal(0.0, "config")
    flush.signal(1.9, "weights")
    assert flush.take(3.8) is None
    assert flush.take(3.9) == ["config", "weights"]


def test_files_closed_more_than_a_debounce_apart_go_out_separately() -> None:
    flush = schedule()
    flush.signal(0.0, "config")
    assert flush.take(2.0) == ["config"]
    flush.finished(2.5)
    flush.signal(2.6, "weights")
    assert flush.take(4.6) == ["weights"]


def test_a_stream_of_closes_is_sent_after_thirty_seconds_at_most() -> None:
    flush = schedule()
    for second in range(30):
        flush.signal(float(second), f"f{second}")
        assert flush.take(second + 0.5) is None
    assert flush.take(30.0) == [f"f{second}" for second in range(30)]


def test_a_big_upload_delays_what_is_closed_meanwhile_by_itself_and_a_debounce() -> None:
    flush = schedule()
    flush.signal(0.0, "checkpoint")
    assert flush.take(2.0) == ["checkpoint"]
    flush.signal(3.0, "adapter")
    assert flush.take(5.0) is None, "one flush loop: nothing goes out while it uploads"
    flush.finished(60.0)
    assert flush.take(61.9) is None, "its debounce starts when the loop receives it"
    assert flush.take(62.0) == ["adapter"]


def test_a_file_closed_twice_is_sent_once() -> None:
    flush = schedule()
    for item in ("a", "b", "a"):
        flush.signal(0.0, item)
    assert flush.take(2.0) == ["b", "a"]


def test_a_wake_without_a_file_is_an_empty_batch() -> None:
    flush = schedule()
    flush.signal(0.0)
    assert flush.take(2.0) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["signal", "finish"]), st.floats(0, 40, allow_nan=False), st.integers(0, 3)),
        max_size=40,
    )
)
def test_no_file_is_lost_sent_early_or_kept_longer_than_the_window(
    events: list[tuple[str, float, int]],
) -> None:
    flush = schedule()
    now, free_since, waiting = 0.0, 0.0, {}
    uploading = False
    for kind, pause, item in events:
        due = flush.due_at()
        if due is not None and due <= now + pause:
            sent = flush.take(due)
            assert sent is not None
            assert sorted(sent) == sorted(waiting), "a batch holds all that was closed, each file once"
            opened = max(min(first for first, _ in waiting.values()), free_since)
            last = max(max(last for _, last in waiting.values()), free_since)
            assert due == min(opened + HF.flush_window_s, last + HF.flush_debounce_s)
            waiting, uploading = {}, True
        now += pause
        if kind == "signal":
            waiting[item] = (waiting.get(item, (now, now))[0], now)
            flush.signal(now, item)
        elif uploading:
            flush.finished(now)
            uploading, free_since = False, now
        assert (flush.due_at() is None) == (uploading or not waiting)
