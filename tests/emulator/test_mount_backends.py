"""A bucket that is a folder: whole objects or none, also between processes, on a full disk, and after an overwrite."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bucket_grpo.emulator.backends import Add, Delete, FolderBackend, Stat


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBackend:
    return FolderBackend(tmp_path / "objects")


def put(bucket: FolderBackend, tmp_path: Path, key: str, data: bytes) -> Stat:
    staged = tmp_path / "staged"
    staged.write_bytes(data)
    bucket.commit([Add(key, bucket.upload(staged, key).etag)])
    stat = bucket.stat(key)
    assert stat is not None
    return stat


def read(bucket: FolderBackend, stat: Stat) -> bytes:
    reader = bucket.open(stat)
    try:
        return reader.read(0, stat.size)
    finally:
        reader.close()


def test_an_upload_shows_only_after_its_commit(bucket: FolderBackend, tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"one")
    uploaded = bucket.upload(tmp_path / "staged", "run/v1")
    assert bucket.stat("run/v1") is None
    assert not bucket.list_folder("")
    assert bucket.commit([Add("run/v1", uploaded.etag)]) == []
    assert read(bucket, bucket.stat("run/v1")) == b"one"
    assert bucket.list_folder("").folders == ("run",)
    assert [stat.key for stat in bucket.list_folder("run").files] == ["run/v1"]


def test_a_reader_keeps_the_content_that_it_knew(bucket: FolderBackend, tmp_path: Path) -> None:
    first = put(bucket, tmp_path, "current.json", b"first")
    second = put(bucket, tmp_path, "current.json", b"second!")
    assert (read(bucket, first), read(bucket, second)) == (b"first", b"second!")
    bucket.commit([Delete("current.json")])
    assert read(bucket, second) == b"second!"


def test_a_reader_keeps_the_content_also_when_no_mount_replaced_it(bucket: FolderBackend, tmp_path: Path) -> None:
    first = put(bucket, tmp_path, "current.json", b"first")
    (tmp_path / "next").write_bytes(b"second!")
    os.replace(tmp_path / "next", tmp_path / "objects" / "current.json")
    assert read(bucket, first) == b"first"


def test_asking_for_many_objects_does_not_use_up_file_descriptors(bucket: FolderBackend, tmp_path: Path) -> None:
    (tmp_path / "objects" / "d").mkdir()
    for number in range(1000):
        (tmp_path / "objects" / "d" / str(number)).write_bytes(b"x")
        assert bucket.stat(f"d/{number}") is not None
    assert len(os.listdir("/proc/self/fd")) < 400


def test_content_that_is_gone_for_good_is_an_io_error(bucket: FolderBackend) -> None:
    with pytest.raises(OSError) as raised:
        bucket.open(Stat("v1", 3, 0.0, "1-2-3"))
    assert raised.value.errno == errno.EIO


def test_a_copy_under_another_key_survives_the_first(bucket: FolderBackend, tmp_path: Path) -> None:
    stat = put(bucket, tmp_path, "tmp/v1", b"one")
    bucket.commit([Add("run/v1", stat.etag, source="tmp/v1"), Delete("tmp/v1")])
    assert read(bucket, bucket.stat("run/v1")) == b"one"
    assert bucket.list_folder("").folders == ("run",), "a folder goes with its last object"


def test_what_could_not_be_applied_is_said_and_the_rest_is_done(bucket: FolderBackend, tmp_path: Path) -> None:
    put(bucket, tmp_path, "a", b"a")
    failed = bucket.commit([Delete("missing"), Delete("a")])
    assert failed == [Delete("missing")]
    assert bucket.stat("a") is None


def test_deleting_is_exact(bucket: FolderBackend, tmp_path: Path) -> None:
    put(bucket, tmp_path, "run/v1", b"1")
    put(bucket, tmp_path, "run/v10", b"10")
    bucket.commit([Delete("run/v1")])
    assert bucket.stat("run/v10") is not None


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd"])
def test_a_key_cannot_leave_the_bucket(bucket: FolderBackend, key: str) -> None:
    with pytest.raises(OSError, match="leaves the bucket"):
        bucket.stat(key)


WRITER = """
import sys
import threading
from pathlib import Path
from bucket_grpo.emulator.backends import Add, FolderBackend
root, staged = Path(sys.argv[1]), Path(sys.argv[2])
bucket = FolderBackend(root)
for number in range(200):
    staged.write_bytes(bytes([number]) * (200_000 + number))
    bucket.commit([Add("v", bucket.upload(staged, "v").etag)])
"""


def test_a_reader_in_another_process_never_sees_a_mix(bucket: FolderBackend, tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "objects", tmp_path / "staged"])
    seen = set()
    while writer.poll() is None:
        stat = bucket.stat("v")
        if stat:
            data = read(bucket, stat)
            assert len(set(data)) == 1
            assert len(data) == stat.size == 200_000 + data[0]
            seen.add(data[0])
    assert writer.returncode == 0
    assert len(seen) > 1, "the reader must have watched at least one overwrite"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk]).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_fails_the_upload_and_leaves_nothing_behind(small_disk: Path, tmp_path: Path) -> None:
    bucket = FolderBackend(small_disk)
    staged = tmp_path / "big"
    staged.write_bytes(b"x" * 1_000_000)
    with pytest.raises(OSError) as raised:
        bucket.upload(staged, "big")
    assert raised.value.errno == errno.ENOSPC
    put(bucket, tmp_path, "small", b"y" * 100_000)
    assert read(bucket, bucket.stat("small")) == b"y" * 100_000


def test_a_listing_is_whole_while_other_objects_come_and_go(bucket: FolderBackend, tmp_path: Path) -> None:
    put(bucket, tmp_path, "stays", b"x")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            put(bucket, tmp_path, "comes", b"y")
            bucket.commit([Delete("comes")])

    churner = threading.Thread(target=churn)
    churner.start()
    try:
        for _ in range(2000):
            assert "stays" in [stat.key for stat in bucket.list_folder("").files]
    finally:
        stop.set()
        churner.join()
