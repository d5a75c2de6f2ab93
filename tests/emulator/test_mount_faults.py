"""Faults on demand: each does what its name says, to the keys that it names, and can be switched while it runs."""

import errno
import json
from pathlib import Path

import pytest
from mount_processes import wait_for

from bucket_grpo.emulator.backends import Add, Delete, FolderBackend
from bucket_grpo.emulator.faults import FaultControl, FaultyBackend, hit, parse_faults


def backend(tmp_path: Path, *settings: str, sleeps: list[float] | None = None) -> FaultyBackend:
    control = FaultControl(parse_faults(settings))
    return FaultyBackend(FolderBackend(tmp_path / "objects"), control, (sleeps if sleeps is not None else []).append)


def put(bucket: FaultyBackend, tmp_path: Path, *keys: str, data: bytes = b"0123456789") -> list:
    staged = tmp_path / "staged"
    staged.write_bytes(data)
    return bucket.commit([Add(key, bucket.upload(staged, key).etag) for key in keys])


@pytest.mark.parametrize(
    ("ratio", "hits"), [("0", []), ("2", [0, 1]), ("1/3", [0, 3, 6]), ("2/3", [0, 1, 3, 4, 6, 7]), ("1/1", [*range(9)])]
)
def test_a_ratio_hits_the_first_n_of_each_m(ratio: str, hits: list[int]) -> None:
    assert [number for number in range(9) if hit(ratio, number)] == hits


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [("fail_commits", "name=value"), ("fail_comits=1", "fail_comits"), ("fail_reads=5/2", "not of the form"),
     ("disk_full=moon", "disk_full"), ("op_gap_s=-1", "op_gap_s")],
)  # fmt: skip
def test_a_wrong_fault_is_refused_with_its_name(setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_faults([setting])


def test_a_dropped_commit_is_acknowledged_and_lost(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "drop_commits=1")
    assert put(bucket, tmp_path, "a") == []
    assert bucket.stat("a") is None
    put(bucket, tmp_path, "b")
    assert bucket.stat("b") is not None


def test_a_failed_commit_applies_nothing(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "fail_commits=1/2")
    with pytest.raises(OSError) as raised:
        put(bucket, tmp_path, "a", "b")
    assert raised.value.errno == errno.EIO
    assert bucket.stat("a") is None
    put(bucket, tmp_path, "a")
    assert bucket.stat("a") is not None


def test_a_partial_batch_leaves_operations_out_and_says_which(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "partial_batches=1/2")
    failed = put(bucket, tmp_path, "a", "b", "c", "d")
    assert [op.key for op in failed] == ["a", "c"]
    assert [key for key in "abcd" if bucket.stat(key)] == ["b", "d"]


def test_the_operations_of_a_batch_can_be_spread_and_reversed(tmp_path: Path) -> None:
    sleeps: list[float] = []
    bucket = backend(tmp_path, "op_gap_s=3", "reverse_batches=true", sleeps=sleeps)
    put(bucket, tmp_path, "a")
    bucket.commit([Delete("a"), Add("b", "", source="a")])
    assert sleeps == [3.0]
    assert bucket.stat("b") is not None, "in the batch's own order there would have been nothing to copy"


def test_a_hidden_commit_shows_after_a_later_one(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "hide_commits=1", "hide_s=0.3")
    assert put(bucket, tmp_path, "v1") == []
    put(bucket, tmp_path, "v2")
    assert (bucket.stat("v1"), bucket.stat("v2") is None) == (None, False)
    wait_for(lambda: bucket.stat("v1"))


def test_stale_contents_come_under_a_fresh_stat(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "stale_contents=1")
    put(bucket, tmp_path, "current.json", data=b"first")
    bucket.stat("current.json")
    put(bucket, tmp_path, "current.json", data=b"second!")
    stat = bucket.stat("current.json")
    assert stat is not None
    assert stat.size == 7
    reader = bucket.open(stat)
    assert reader.read(0, 100) == b"first"
    reader.close()
    reader = bucket.open(stat)
    assert reader.read(0, 100) == b"second!"
    reader.close()


def test_a_delayed_commit_and_slow_requests_wait(tmp_path: Path) -> None:
    sleeps: list[float] = []
    bucket = backend(tmp_path, "delay_commits_s=5", "request_delay_s=2", sleeps=sleeps)
    put(bucket, tmp_path, "a")
    bucket.stat("a")
    bucket.list_folder("")
    assert sleeps == [5.0, 2.0, 2.0]


def test_a_truncated_object_is_whole_to_the_bucket(tmp_path: Path) -> None:
    bucket = backend(tmp_path, "truncate_objects_to=4", "match=*.safetensors")
    put(bucket, tmp_path, "v1.safetensors", "v1.json")
    assert (bucket.stat("v1.safetensors").size, bucket.stat("v1.json").size) == (4, 10)


def test_a_full_bucket_is_enospc(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        put(backend(tmp_path, "disk_full=bucket"), tmp_path, "a")
    assert raised.value.errno == errno.ENOSPC


def test_reads_fail_and_are_slow(tmp_path: Path) -> None:
    sleeps: list[float] = []
    bucket = backend(tmp_path, "fail_reads=1", "read_delay_s=0.5", sleeps=sleeps)
    put(bucket, tmp_path, "a")
    reader = bucket.open(bucket.stat("a"))
    with pytest.raises(OSError) as raised:
        reader.read(0, 10)
    assert raised.value.errno == errno.EIO
    assert reader.read(0, 10) == b"0123456789"
    reader.close()
    assert sleeps == [0.5, 0.5]


def test_faults_change_while_running_and_end_with_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.json"
    control = FaultControl(path=path)
    assert control.now().fail_commits == "0"
    path.write_text(json.dumps({"fail_commits": "1"}))
    assert [control.hits("fail_commits", "a") for _ in range(2)] == [True, False]
    path.write_text(json.dumps({"fail_commits": "1", "match": "*"}))
    assert control.hits("fail_commits", "a"), "a change starts the count anew"
    path.write_text('{"fail_comm')
    assert control.now().fail_commits == "1", "a broken file changes nothing"
    assert "not used" in capsys.readouterr().err
    path.unlink()
    assert control.now().fail_commits == "0"
