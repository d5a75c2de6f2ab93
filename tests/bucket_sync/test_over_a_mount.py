"""The publish path over real FUSE mounts of the emulator, ten times as fast as hf-mount, with its faults."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peft_folders import BASE, INCARNATION, RUN

from bucket_grpo.bucket_sync.handover import hand_over
from bucket_grpo.bucket_sync.mounted_store import MountedStore, is_mount
from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import Conflict, StoreError
from bucket_grpo.bucket_sync.version_file import pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef
from tests.emulator.mount_processes import Mounts, needs_fuse

pytestmark = needs_fuse


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    mounts.objects.mkdir()
    yield mounts
    mounts.close()


@pytest.fixture
def pack(adapter: Callable[..., Path]) -> Callable[..., tuple[bytes, VersionRef]]:
    def make(number: int = 1, **options: object) -> tuple[bytes, VersionRef]:
        folder = adapter(seed=number, **options)
        return pack_version(folder, run=RUN, incarnation=INCARNATION, number=number, step=number, base_model=BASE)

    return make


def writer(mounts: Mounts, *flags: str) -> MountedStore:
    trainer = mounts.mount("trainer", *flags)
    return MountedStore(trainer.path, committed_in=MountedStore(mounts.objects))


def publish(store: MountedStore, packed: tuple[bytes, VersionRef], confirm_s: float = 5.0) -> int:
    """Returns how many times the version had to be written again."""
    data, ref = packed
    return hand_over(store, {ref.key: lambda: data}, confirm_s=confirm_s).retries


def test_a_version_reaches_two_read_only_mounts(mounts, pack, tmp_path):
    store = writer(mounts)
    replicas = [mounts.mount(f"replica-{i}", "--read-only") for i in range(2)]
    assert is_mount(store.path)
    for number in (1, 2, 3):
        packed = pack(number)
        assert publish(store, packed) == 0
        for replica in replicas:
            stager = Stager(MountedStore(replica.path), None, tmp_path / f"staging-{replica.path.name}", BASE)
            assert stager.stage(packed[1], deadline_s=5).retries == 0


def test_the_same_bytes_are_a_no_op_and_others_a_conflict(mounts, pack):
    store = writer(mounts)
    packed = pack(1)
    publish(store, packed)
    before = (mounts.objects / packed[1].key).stat().st_mtime_ns
    assert publish(store, packed) == 0
    assert (mounts.objects / packed[1].key).stat().st_mtime_ns == before
    with pytest.raises(Conflict):
        store.write_once(packed[1].key, b"other bytes")


@pytest.mark.parametrize("fault", ["drop_commits=1", "fail_commits=1", "fail_commits=2", "partial_batches=1"])
def test_a_lost_commit_is_noticed_and_written_again(mounts, pack, fault):
    """The mount does not retry it; a failed one shows as EIO on the next close of the file."""
    store = writer(mounts, "--fault", fault)
    packed = pack(1)
    retries = hand_over(store, {packed[1].key: lambda: packed[0]}, attempts=5, confirm_s=1.0).retries
    assert retries >= 1
    assert (mounts.objects / packed[1].key).read_bytes() == packed[0]


def test_a_commit_that_never_works_ends_in_an_error(mounts, pack):
    store = writer(mounts, "--fault", "drop_commits=1/1")
    with pytest.raises(StoreError, match=r"seen: None|EIO"):
        publish(store, pack(1), confirm_s=0.6)


def test_a_full_disk_under_the_mount_is_said(mounts, pack):
    store = writer(mounts, "--fault", "disk_full=staging")
    with pytest.raises(StoreError, match="No space left on device"):
        publish(store, pack(1))


def test_a_name_that_was_probed_too_early_is_read_through_the_fallback(mounts, pack, tmp_path):
    store = writer(mounts)
    old = mounts.mount("old", "--read-only", "--profile", "hf-mount-2026-08", time_scale=1.0)
    packed = pack(1)
    assert not (old.path / packed[1].key).exists()
    publish(store, packed)
    objects = MountedStore(mounts.objects)
    stager = Stager(MountedStore(old.path), objects, tmp_path / "staging", BASE, patience_s=0.5)
    started = time.monotonic()
    assert stager.stage(packed[1], deadline_s=20).source == repr(objects)
    assert time.monotonic() - started < 5


def test_a_mount_that_reads_eio_is_replaced_at_once(mounts, pack, tmp_path):
    store = writer(mounts)
    broken = mounts.mount("broken", "--read-only", "--fault", "fail_reads=1/1")
    packed = pack(1)
    publish(store, packed)
    objects = MountedStore(mounts.objects)
    with pytest.raises(StoreError, match="EIO"):
        Stager(MountedStore(broken.path), None, tmp_path / "staging", BASE).stage(packed[1], deadline_s=0.5)
    staged = Stager(MountedStore(broken.path), objects, tmp_path / "staging", BASE).stage(packed[1], deadline_s=5)
    assert (staged.source, staged.retries) == (repr(objects), 1)


def test_a_mount_that_dies_is_replaced(mounts, pack, tmp_path):
    store = writer(mounts)
    dead = mounts.mount("dead", "--read-only")
    packed = pack(1)
    publish(store, packed)
    view = MountedStore(dead.path)
    dead.kill()
    objects = MountedStore(mounts.objects)
    assert Stager(view, objects, tmp_path / "staging", BASE, read_s=1).stage(packed[1]).source == repr(objects)


def test_a_pointer_is_replaced_over_a_mount(mounts):
    store = writer(mounts)
    replica = MountedStore(mounts.mount("replica", "--read-only").path)
    for content in (b'{"incarnation": "a"}', b"{}"):
        store.write_pointer("run/current.json", content)
        deadline = time.monotonic() + 10
        while not (mounts.objects / "run/current.json").exists() or replica.read("run/current.json") != content:
            assert time.monotonic() < deadline
            time.sleep(0.05)
