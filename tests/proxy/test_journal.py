"""The journal says what really answered, survives a kill, and never holds up a request."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bucket_grpo.proxy.completion import ids_sha256
from bucket_grpo.proxy.journal import Journal, Record


def record(index: int = 0) -> Record:
    return Record(
        id=f"r{index}",
        requested="trl-policy-v1",
        served="demo-x-v1",
        number=1,
        replica="a",
        route="cold",
        retries=0,
        late=False,
        status=200,
        prompt_sha256="0" * 64,
        latency_s=0.5,
        prompt=[1, 2],
        output=[3, 4, 5],
        logprobs=[-0.1, -0.2, -0.3],
        prompt_tokens=2,
        completion_tokens=3,
        finish_reason="stop",
    )


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for file in folder.glob("journal-*.jsonl") for line in file.read_text().splitlines()]


def test_every_completion_is_a_line_and_the_sampled_ones_hold_their_tokens(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sample_frac=0.25, seed=1)
    for index in range(1000):
        journal.write(record(index))
    journal.close()
    lines = lines_of(tmp_path)
    assert [line["id"] for line in lines] == [f"r{index}" for index in range(1000)]
    assert {line["output_sha256"] for line in lines} == {ids_sha256([3, 4, 5])}
    samples = [line["sample"] for line in lines if "sample" in line]
    assert 200 < len(samples) < 300
    assert samples[0] == {"prompt": [1, 2], "output": [3, 4, 5], "logprobs": [-0.1, -0.2, -0.3]}


def test_lines_reach_the_disk_within_a_second_without_a_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sample_frac=0)
    journal.write(record())
    deadline = time.monotonic() + 1
    while not lines_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(lines_of(tmp_path)) == 1
    journal.close()


def test_a_kill_loses_at_most_the_last_half_second(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_journal import record; from bucket_grpo.proxy.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]), 0.5)\n"
        "for index in range(10**6):\n    journal.write(record(index)); print(index, flush=True); time.sleep(0.001)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    began, written = time.monotonic(), []
    for line in writer.stdout:
        written.append((time.monotonic(), int(line)))
        if time.monotonic() - began > 2:
            break
    os.kill(writer.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    writer.wait()
    kept = {line["id"] for line in lines_of(tmp_path)}
    must_be_there = {f"r{index}" for at, index in written if at < killed_at - 1.0}
    assert len(must_be_there) > 50
    assert must_be_there <= kept


def test_a_full_disk_is_counted_and_shown_and_stops_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, sample_frac=0)
    journal._file.close()
    journal._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    journal.write(record())
    deadline = time.monotonic() + 5
    while journal.error is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert journal.dropped == 1
    assert "No space left" in str(journal.error)
    assert "completions go on unrecorded" in caplog.text
    journal.close()


def test_more_than_can_be_written_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucket_grpo.proxy.journal.MAX_PENDING", 10)
    monkeypatch.setattr("bucket_grpo.proxy.journal.FLUSH_S", 3600)
    journal = Journal(tmp_path, sample_frac=0)
    for index in range(25):
        journal.write(record(index))
    assert journal.dropped == 15
    journal.close()
    assert len(lines_of(tmp_path)) == 10


def test_odd_token_ids_still_get_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, sample_frac=1)
    odd = record()
    odd.output = ["x", None, -1]  # type: ignore[list-item]
    journal.write(odd)
    journal.close()
    assert len(lines_of(tmp_path)) == 1
