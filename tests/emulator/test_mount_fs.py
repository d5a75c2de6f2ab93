"""A mount without the kernel: flushing, failed commits, staging and shutdown, each within a second."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bucket_grpo.emulator.backends import FolderBackend
from bucket_grpo.emulator.faults import FaultControl, parse_faults
from bucket_grpo.emulator.mount_fs import BucketMount
from bucket_grpo.emulator.profiles import PROFILES, MountProfile

QUICK = PROFILES["hf-mount-2026-09"].scaled(0.1)  # debounce 0.2 s, cache 1 s
Mounter = Callable[..., BucketMount]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mounter]:
    mounts = []

    def mount(*faults: str, profile: MountProfile = QUICK, read_only: bool = False) -> BucketMount:
        staging = tmp_path / "staging"
        staging.mkdir(exist_ok=True)
        bucket = BucketMount(
            FolderBackend(tmp_path / "objects"),
            profile,
            read_only=read_only,
            control=FaultControl(parse_faults(faults)),
            staging_parent=staging,
        )
        bucket.start()
        mounts.append(bucket)
        return bucket

    yield mount
    for bucket in mounts:
        bucket.stop()


def write(mount: BucketMount, key: str, data: bytes) -> None:
    handle = mount.create(key)
    mount.write(handle, 0, data)
    close(mount, handle)


def close(mount: BucketMount, handle: int) -> None:
    """What the kernel does for `close()`."""
    try:
        mount.flush(handle)
    finally:
        mount.release(handle)


def read(mount: BucketMount, key: str) -> bytes:
    node = mount.stat(key)
    handle = mount.open(key, os.O_RDONLY)
    try:
        return mount.read(handle, 0, node.size)
    finally:
        close(mount, handle)


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_close_returns_at_once_and_the_bucket_has_the_file_after_the_debounce(mounted: Mounter, tmp_path: Path) -> None:
    mount, object_ = mounted(), tmp_path / "objects" / "v1"
    start = time.monotonic()
    write(mount, "v1", b"x" * 1_000_000)
    assert time.monotonic() - start < QUICK.flush_debounce_s
    assert not object_.exists()
    wait_for(object_.exists)
    assert time.monotonic() - start >= QUICK.flush_debounce_s + QUICK.upload_s
    assert object_.read_bytes() == b"x" * 1_000_000


def test_a_failed_commit_is_not_tried_again_and_shows_on_the_next_close(mounted: Mounter, tmp_path: Path) -> None:
    mount, object_ = mounted("fail_commits=1"), tmp_path / "objects" / "v1"
    write(mount, "v1", b"one")
    time.sleep(4 * QUICK.flush_debounce_s)
    assert not object_.exists()
    assert read_error_on_close(mount, "v1") == errno.EIO
    assert read_error_on_close(mount, "v1") is None, "the error is told once"
    time.sleep(3 * QUICK.flush_debounce_s)
    assert not object_.exists(), "closing a reader sends nothing"


def read_error_on_close(mount: BucketMount, key: str) -> int | None:
    handle = mount.open(key, os.O_RDONLY)
    try:
        close(mount, handle)
    except OSError as error:
        return error.errno
    return None


def test_a_writer_sees_its_file_whether_or_not_the_bucket_got_it(mounted: Mounter, tmp_path: Path) -> None:
    writer, reader = mounted("drop_commits=1"), mounted(read_only=True)
    write(writer, "v1", b"one")
    time.sleep(4 * QUICK.flush_debounce_s)
    assert writer.stat("v1").size == 3
    with pytest.raises(FileNotFoundError):
        reader.stat("v1")


def test_fsync_only_asks_for_a_flush_and_may_send_half_a_file(mounted: Mounter, tmp_path: Path) -> None:
    mount, object_ = mounted(), tmp_path / "objects" / "v1"
    handle = mount.create("v1")
    mount.write(handle, 0, b"half")
    mount.fsync(handle)
    assert not object_.exists()
    wait_for(object_.exists)
    assert object_.read_bytes() == b"half"
    mount.write(handle, 4, b" and half")
    close(mount, handle)
    wait_for(lambda: object_.read_bytes() == b"half and half")


def test_an_open_file_without_fsync_is_not_sent(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted()
    handle = mount.create("v1")
    mount.write(handle, 0, b"one")
    time.sleep(3 * QUICK.flush_debounce_s)
    assert not (tmp_path / "objects" / "v1").exists()
    close(mount, handle)


def test_a_big_upload_delays_the_next_file(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted(profile=replace(QUICK, upload_bandwidth=1e6))
    write(mount, "checkpoint", b"x" * 1_000_000)  # one second
    time.sleep(2 * QUICK.flush_debounce_s)
    start = time.monotonic()
    write(mount, "adapter", b"y")
    wait_for((tmp_path / "objects" / "adapter").exists)
    assert time.monotonic() - start > 0.7


def test_another_mount_of_the_same_bucket_is_not_delayed(mounted: Mounter, tmp_path: Path) -> None:
    slow, quick = mounted(profile=replace(QUICK, upload_bandwidth=1e5)), mounted()
    write(slow, "checkpoint", b"x" * 1_000_000)
    time.sleep(2 * QUICK.flush_debounce_s)
    write(quick, "adapter", b"y")
    wait_for((tmp_path / "objects" / "adapter").exists)
    assert not (tmp_path / "objects" / "checkpoint").exists()
    slow.profile = replace(QUICK, shutdown_flush_s=0.1)


def test_stopping_flushes_and_removes_the_staging_files(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted(profile=PROFILES["hf-mount-2026-09"])
    write(mount, "v1", b"one")
    start = time.monotonic()
    mount.stop()
    assert time.monotonic() - start < 2.0, "it does not wait for the debounce"
    assert (tmp_path / "objects" / "v1").read_bytes() == b"one"
    assert list((tmp_path / "staging").iterdir()) == []


def test_stopping_sends_open_files_and_those_whose_commit_had_failed(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted("fail_commits=1")
    write(mount, "failed", b"one")
    time.sleep(3 * QUICK.flush_debounce_s)
    assert not (tmp_path / "objects" / "failed").exists()
    handle = mount.create("open")
    mount.write(handle, 0, b"two")
    mount.stop()
    assert (tmp_path / "objects" / "failed").read_bytes() == b"one"
    assert (tmp_path / "objects" / "open").read_bytes() == b"two"


def test_unlinking_a_file_during_its_upload_does_not_harm_the_rest_of_the_batch(
    mounted: Mounter, tmp_path: Path
) -> None:
    mount = mounted(profile=replace(QUICK, upload_s=0.5))
    write(mount, "gone", b"gone")
    write(mount, "stays", b"stays")
    time.sleep(2 * QUICK.flush_debounce_s)  # the upload has begun
    mount.unlink("gone")
    wait_for((tmp_path / "objects" / "stays").exists)
    assert read_error_on_close(mount, "stays") is None


def test_truncating_a_file_during_its_upload_waits_so_that_no_torn_object_shows(
    mounted: Mounter, tmp_path: Path
) -> None:
    mount, object_ = mounted(profile=replace(QUICK, upload_s=0.5)), tmp_path / "objects" / "current.json"
    write(mount, "current.json", b"first")
    time.sleep(2 * QUICK.flush_debounce_s)
    handle = mount.open("current.json", os.O_WRONLY | os.O_TRUNC)
    mount.write(handle, 0, b"second")
    close(mount, handle)
    wait_for(object_.exists)
    assert object_.read_bytes() == b"first"
    wait_for(lambda: object_.read_bytes() == b"second")


def test_staging_is_freed_once_the_bucket_has_the_file(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted()
    for number in range(5):
        write(mount, f"v{number}", b"x" * 1000)
    wait_for((tmp_path / "objects" / "v4").exists)
    wait_for(lambda: not [path for path in (tmp_path / "staging").rglob("*") if path.is_file()])
    assert read(mount, "v3") == b"x" * 1000


def test_a_partial_batch_is_taken_for_a_success(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted("partial_batches=1")
    write(mount, "config", b"{}")
    write(mount, "weights", b"ww")
    wait_for((tmp_path / "objects" / "weights").exists)
    assert not (tmp_path / "objects" / "config").exists()
    assert read_error_on_close(mount, "weights") is None
    assert mount.stat("config").size == 2, "nothing tells the writer"


def test_a_full_staging_disk_fails_the_write_and_a_full_bucket_the_flush(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted("disk_full=staging")
    handle = mount.create("v1")
    with pytest.raises(OSError) as raised:
        mount.write(handle, 0, b"one")
    assert raised.value.errno == errno.ENOSPC
    close(mount, handle)
    full = mounted("disk_full=bucket")
    write(full, "v2", b"two")
    time.sleep(3 * QUICK.flush_debounce_s)
    assert read_error_on_close(full, "v2") == errno.EIO
    assert not (tmp_path / "objects" / "v2").exists()


def test_rewriting_part_of_a_committed_file_keeps_the_rest(mounted: Mounter, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "log").write_bytes(b"hello world")
    mount = mounted()
    mount.stat("log")
    handle = mount.open("log", os.O_WRONLY)
    mount.write(handle, 0, b"HELLO")
    close(mount, handle)
    wait_for(lambda: (tmp_path / "objects" / "log").read_bytes() == b"HELLO world")
    assert read(mount, "log") == b"HELLO world"


def test_an_open_reader_keeps_its_bytes_while_the_object_is_replaced(mounted: Mounter, tmp_path: Path) -> None:
    writer, reader = mounted(), mounted(read_only=True)
    write(writer, "current.json", b"first")
    wait_for((tmp_path / "objects" / "current.json").exists)
    reader.stat("current.json")
    handle = reader.open("current.json", os.O_RDONLY)
    writing = writer.open("current.json", os.O_WRONLY | os.O_TRUNC)
    writer.write(writing, 0, b"second")
    close(writer, writing)
    wait_for(lambda: (tmp_path / "objects" / "current.json").read_bytes() == b"second")
    assert reader.read(handle, 0, 100) == b"first"
    close(reader, handle)
    assert read(reader, "current.json") == b"first", "a new open does not ask either"
    time.sleep(QUICK.revalidate_s)
    assert read(reader, "current.json") == b"second"


def test_a_read_only_mount_refuses_every_change(mounted: Mounter, tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "v1").write_bytes(b"one")
    mount = mounted(read_only=True)
    mount.stat("v1")
    changes: list[Callable[[], object]] = [
        lambda: mount.create("v2"),
        lambda: mount.open("v1", os.O_WRONLY),
        lambda: mount.unlink("v1"),
        lambda: mount.rename("v1", "v2"),
        lambda: mount.make_folder("d"),
        lambda: mount.truncate("v1", 0, None),
    ]
    for change in changes:
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EROFS


def test_local_has_no_delays(mounted: Mounter, tmp_path: Path) -> None:
    writer, reader = mounted(profile=PROFILES["local"]), mounted(profile=PROFILES["local"], read_only=True)
    with pytest.raises(FileNotFoundError):
        reader.stat("v1")
    start = time.monotonic()
    write(writer, "v1", b"one")
    wait_for((tmp_path / "objects" / "v1").exists)
    assert read(reader, "v1") == b"one"
    assert time.monotonic() - start < 0.5


def test_many_threads_write_and_read_through_one_mount(mounted: Mounter, tmp_path: Path) -> None:
    mount = mounted(profile=PROFILES["local"])
    problems: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for number in range(20):
                key, data = f"w{worker}-{number}", bytes([worker]) * (1000 + number)
                write(mount, key, data)
                assert read(mount, key) == data
                mount.rename(key, f"done-{key}")
        except BaseException as problem:  # noqa: BLE001 - carried to the main thread, which fails the test
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    mount.stop()
    # A rename during the upload leaves a file under its old name, as with hf-mount; no content is ever mixed up.
    objects = [path for path in (tmp_path / "objects").iterdir() if path.is_file()]
    assert len(objects) == 120
    for path in objects:
        worker, number = path.name.removeprefix("done-").removeprefix("w").split("-")
        assert path.read_bytes() == bytes([int(worker)]) * (1000 + int(number))
