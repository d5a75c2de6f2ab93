import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from peft_folders import BASE, INCARNATION, RUN

from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import MountedStore, NotFound, StoreError
from bucket_grpo.bucket_sync.version_file import Canary, VersionRejected, pack_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef


class FaultyMount(MountedStore):
    """Reads go through `faults` first: each entry replaces one read (bytes, or an error to raise, or a wait in s)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.faults: list[bytes | Exception | float] = []
        self.reads = 0

    def read(self, key: str, *, max_bytes: int = 2**40) -> bytes:
        self.reads += 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, bytes):
            return fault
        if isinstance(fault, float):
            time.sleep(fault)
        return super().read(key, max_bytes=max_bytes)


@pytest.fixture
def mount(tmp_path: Path) -> FaultyMount:
    (tmp_path / "bucket").mkdir()
    return FaultyMount(tmp_path / "bucket")


@pytest.fixture
def published(mount: FaultyMount, adapter: Callable[..., Path]) -> Callable[..., VersionRef]:
    def publish(number: int = 1, **options: object) -> VersionRef:
        canary = Canary(prompt=[1, 2], logprobs=[-1.0])
        data, ref = pack_version(
            adapter(**options), run=RUN, incarnation=INCARNATION, number=number, step=1, base_model=BASE, canary=canary
        )
        mount.write_once(ref.key, data)
        return ref

    return publish


def test_a_version_is_staged_as_a_folder_with_what_the_agent_needs(mount, published, tmp_path):
    ref = published()
    stager = Stager(mount, None, tmp_path / "staging", BASE)
    staged = stager.stage(ref)
    assert sorted(path.name for path in staged.folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert staged.folder.name == ref.name
    assert staged.canary.prompt == [1, 2]
    assert (staged.retries, stager.counts.staged) == (0, 1)
    stager.evict(ref)
    stager.evict(ref)
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("fault", [NotFound("hidden"), b"", b"truncated", StoreError("EIO")])
def test_what_a_mount_hides_for_a_while_is_read_again(mount, published, tmp_path, fault):
    mount.faults = [fault, fault]
    staged = Stager(mount, None, tmp_path / "staging", BASE).stage(published(), deadline_s=5)
    assert (staged.retries, mount.reads) == (2, 3)


@pytest.mark.parametrize("fault", [NotFound("hidden"), b"truncated", StoreError("EIO")])
def test_a_mount_that_never_shows_it_is_given_up_in_time(mount, published, tmp_path, fault):
    ref = published()
    mount.faults = [fault] * 100
    stager = Stager(mount, None, tmp_path / "staging", BASE)
    started = time.monotonic()
    with pytest.raises((StoreError, VersionRejected)):
        stager.stage(ref, deadline_s=0.5)
    assert time.monotonic() - started < 5
    assert not (tmp_path / "staging").exists()


@pytest.mark.parametrize("fault", [StoreError("EIO"), 5.0])
def test_a_mount_that_fails_or_hangs_is_replaced_and_then_left_alone(mount, published, tmp_path, fault):
    refs = [published(number) for number in (1, 2)]
    mount.faults = [fault] * 100
    hub = MountedStore(mount.path)
    stager = Stager(mount, hub, tmp_path / "staging", BASE, read_s=0.2)
    for ref in refs:
        assert stager.stage(ref, deadline_s=5).source == repr(hub)
    assert (mount.reads, stager.counts.fallbacks) == (1, 2)


def test_a_mount_that_hides_a_confirmed_version_too_long_is_replaced(mount, published, tmp_path):
    mount.faults = [NotFound("30 s negative cache")] * 100
    staged = Stager(mount, MountedStore(mount.path), tmp_path / "staging", BASE, patience_s=0.3).stage(published())
    assert 1 <= staged.retries <= 5


def test_a_version_for_another_base_is_refused_at_once_and_counted(mount, published, tmp_path):
    stager = Stager(mount, None, tmp_path / "staging", "another/base")
    with pytest.raises(VersionRejected, match="another/base"):
        stager.stage(published())
    assert (mount.reads, stager.counts.rejected) == (1, {"wrong_base": 1})


def test_bytes_that_stay_wrong_are_refused_and_counted(mount, published, tmp_path):
    ref = published()
    path = mount.path / ref.key
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    stager = Stager(mount, None, tmp_path / "staging", BASE)
    with pytest.raises(VersionRejected, match="wrong_hash"):
        stager.stage(ref, deadline_s=0.3)
    assert stager.counts.rejected == {"wrong_hash": 1}


def test_nobody_sees_half_a_folder(mount, published, tmp_path):
    """While versions are staged, every folder that has a version's name is complete."""
    refs = [published(number, seed=number) for number in range(1, 30)]
    stager = Stager(mount, None, tmp_path / "staging", BASE)
    done = threading.Event()
    incomplete = []

    def look() -> None:
        while not done.is_set():
            for folder in (tmp_path / "staging").glob(f"{RUN}-*"):
                if len(os.listdir(folder)) != 2:
                    incomplete.append(folder)

    thread = threading.Thread(target=look)
    thread.start()
    for ref in refs:
        stager.stage(ref)
    done.set()
    thread.join()
    assert incomplete == []


def test_what_a_dead_agent_left_is_replaced_or_swept(mount, published, tmp_path):
    ref, other = published(1), published(2)
    stager = Stager(mount, None, tmp_path / "staging", BASE)
    for stale in (ref, other):
        stager.folder(stale).mkdir(parents=True)
    stager.stage(ref)
    stager.keep_only([ref])
    assert [path.name for path in (tmp_path / "staging").iterdir()] == [ref.name]
    assert len(list(stager.folder(ref).iterdir())) == 2


def test_a_full_staging_disk_is_one_clear_error(mount, published, tmp_path, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(StoreError, match="No space left on device"):
        Stager(mount, None, tmp_path / "staging", BASE).stage(published())
    assert list((tmp_path / "staging").iterdir()) == []
