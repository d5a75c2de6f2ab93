import os
import threading
import time
from pathlib import Path

import pytest

from bucket_grpo.bucket_sync.mounted_store import MountedStore, is_mount
from bucket_grpo.bucket_sync.stores import Conflict, HubStore, NotConfirmed, NotFound, StoreError, open_store

KEY = "run/20261130t154500z-a1b2c3/v000001.safetensors"


@pytest.fixture(params=["folder", "mount"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MountedStore:
    """A plain directory, and the same directory treated as a mount that commits by itself."""
    (tmp_path / "bucket").mkdir()
    plain = MountedStore(tmp_path / "bucket")
    return plain if request.param == "folder" else MountedStore(plain.path, committed_in=plain, mounted=True)


def test_a_record_is_written_once(store):
    store.write_once(KEY, b"one")
    store.write_once(KEY, b"one")
    with pytest.raises(Conflict, match="used once"):
        store.write_once(KEY, b"two")
    assert store.read(KEY) == b"one"
    store.confirm(KEY, 3, timeout_s=1)
    assert [info[:2] for info in store.list("")] == [(KEY, 3)]


def test_of_two_writers_one_wins_and_the_other_is_told(store):
    outcomes = []

    def write(data: bytes) -> None:
        try:
            store.write_once(KEY, data)
            outcomes.append(data)
        except Conflict:
            outcomes.append(None)

    threads = [threading.Thread(target=write, args=(b"%d" % i * 1000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = {data for data in outcomes if data}
    assert store.read(KEY) == winner
    assert outcomes.count(None) == 7


def test_a_pointer_is_replaced(store):
    store.write_pointer("run/current.json", b'{"incarnation": "a"}')
    store.write_pointer("run/current.json", b"{}")
    assert store.read("run/current.json") == b"{}"
    assert [info.key for info in store.list("run/")] == ["run/current.json"]


def test_reading_what_is_not_there_or_too_large_is_an_error(store):
    with pytest.raises(NotFound):
        store.read(KEY)
    store.write_once(KEY, b"12345")
    with pytest.raises(StoreError, match="more than 4"):
        store.read(KEY, max_bytes=4)


def test_listing_and_deleting_are_exact(store):
    for key in ("run/a/x", "run/ab/x", "run-2/a/x", "run/a.json"):
        store.write_once(key, b"x")
    assert [info.key for info in store.list("run/a/")] == ["run/a/x"]
    assert store.list("nothing/") == []
    store.delete(["run/a/x", "run/a/never-there"])
    assert [info.key for info in store.list("")] == ["run-2/a/x", "run/a.json", "run/ab/x"]
    with pytest.raises(StoreError, match="end it with '/'"):
        store.list("run/a")


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "a//b", "a/.hidden", "", "a\\b", "a/./b", "a\0b"])
def test_a_path_that_climbs_out_is_refused(store, key):
    for operation in (
        store.read,
        store.committed_size,
        lambda k: store.write_once(k, b"x"),
        lambda k: store.delete([k]),
    ):
        with pytest.raises(StoreError, match="not the key"):
            operation(key)


def test_a_commit_that_was_lost_is_handed_over_again(tmp_path):
    """What a mount shows to its writer proves nothing: only the bucket does."""
    for name in ("mount", "objects"):
        (tmp_path / name).mkdir()
    store = MountedStore(tmp_path / "mount", committed_in=MountedStore(tmp_path / "objects"), mounted=True)
    store.write_once(KEY, b"bytes")
    with pytest.raises(NotConfirmed, match="seen: None"):
        store.confirm(KEY, 5, timeout_s=0.2)
    before = (tmp_path / "mount" / KEY).stat().st_mtime_ns
    time.sleep(0.02)
    store.write_once(KEY, b"bytes")
    assert (tmp_path / "mount" / KEY).stat().st_mtime_ns > before
    (tmp_path / "objects" / KEY).parent.mkdir(parents=True)
    (tmp_path / "objects" / KEY).write_bytes(b"bytes")
    store.confirm(KEY, 5, timeout_s=0.2)


def test_a_mount_whose_bucket_is_unknown_confirms_after_it_has_settled(tmp_path):
    store = MountedStore(tmp_path, mounted=True, settle_s=0.3)
    store.write_once(KEY, b"bytes")
    started = time.monotonic()
    store.confirm(KEY, 5, timeout_s=2)
    assert time.monotonic() - started >= 0.2


def test_a_full_disk_is_one_clear_error_and_leaves_no_part_behind(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a tmpfs")
    try:
        for store in (MountedStore(small), MountedStore(small, mounted=True)):
            with pytest.raises(StoreError, match="No space left on device ENOSPC"):
                store.write_once(KEY, b"x" * 200_000)
            assert [path for path in small.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_store_is_named_by_url_or_path(tmp_path):
    assert isinstance(open_store(tmp_path), MountedStore)
    hub = open_store("hf://buckets/me/rl/sub")
    assert isinstance(hub, HubStore)
    assert repr(hub) == "HubStore(me/rl/sub/)"
    with pytest.raises(StoreError, match="unknown kind"):
        open_store("s3://bucket")
    with pytest.raises(StoreError, match="mount the bucket there first"):
        open_store(tmp_path / "missing")


def test_a_plain_directory_is_told_from_a_mount(tmp_path):
    assert not is_mount(tmp_path)
