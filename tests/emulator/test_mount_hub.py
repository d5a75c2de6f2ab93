"""Mounts of a bucket on the emulated Hub: the same file system, with the Hub's API and xet behind it."""

import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubs import RunningHub, running_hub
from mount_processes import Mounts, needs_fuse, wait_for

from bucket_grpo.emulator.backends import Add, Delete
from bucket_grpo.emulator.mount_hub import HubBackend

BUCKET = "me/rl"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("hub")) as hub:
        hub.create_bucket(BUCKET)
        yield hub


@pytest.fixture
def backend(hub: RunningHub) -> Iterator[HubBackend]:
    backend = HubBackend(BUCKET, endpoint=hub.endpoint, token=hub.token)
    yield backend
    hub.clear_faults()
    if paths := hub.paths(BUCKET):
        backend.commit([Delete(path) for path in paths])


def put(backend: HubBackend, tmp_path: Path, key: str, data: bytes) -> None:
    (tmp_path / "staged").write_bytes(data)
    assert backend.commit([Add(key, backend.upload(tmp_path / "staged", key).etag)]) == []


def read(backend: HubBackend, key: str) -> bytes:
    stat = backend.stat(key)
    assert stat is not None
    reader = backend.open(stat)
    try:
        return reader.read(0, stat.size)
    finally:
        reader.close()


@pytest.mark.parametrize("data", [b"", b"one", random.Random(1).randbytes(300_000)])
def test_what_was_uploaded_is_read_back(backend: HubBackend, tmp_path: Path, data: bytes) -> None:
    put(backend, tmp_path, "run/v 1é", data)
    assert read(backend, "run/v 1é") == data
    assert backend.stat("run") is None
    assert backend.list_folder("").folders == ("run",)
    assert [(stat.key, stat.size) for stat in backend.list_folder("run").files] == [("run/v 1é", len(data))]


def test_an_upload_shows_only_after_its_commit(hub: RunningHub, backend: HubBackend, tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"one")
    backend.upload(tmp_path / "staged", "v1")
    assert hub.paths(BUCKET) == []


def test_listing_a_folder_leaves_its_lexical_siblings_out(backend: HubBackend, tmp_path: Path) -> None:
    put(backend, tmp_path, "run1/v1", b"1")
    put(backend, tmp_path, "run10/v1", b"10")
    assert [stat.key for stat in backend.list_folder("run1").files] == ["run1/v1"]
    assert backend.list_folder("run1").folders == ()


def test_a_replaced_content_is_still_read_by_its_hash(backend: HubBackend, tmp_path: Path) -> None:
    put(backend, tmp_path, "current.json", b"first")
    first = backend.stat("current.json")
    put(backend, tmp_path, "current.json", b"second!")
    assert first is not None
    assert backend.open(first).read(0, 100) == b"first"
    assert read(backend, "current.json") == b"second!"


def test_a_folder_of_a_bucket_is_a_mount_of_its_own(hub: RunningHub, backend: HubBackend, tmp_path: Path) -> None:
    inner = HubBackend(f"{BUCKET}/checkpoints/a", endpoint=hub.endpoint, token=hub.token)
    put(inner, tmp_path, "step-10", b"ten")
    put(backend, tmp_path, "checkpoints/ab", b"sibling")
    assert [stat.key for stat in inner.list_folder("").files] == ["step-10"]
    assert read(backend, "checkpoints/a/step-10") == read(inner, "step-10") == b"ten"


def test_a_rename_is_an_addition_by_hash_and_a_deletion(backend: HubBackend, tmp_path: Path) -> None:
    put(backend, tmp_path, "v1.tmp", b"one")
    stat = backend.stat("v1.tmp")
    assert stat is not None
    assert backend.commit([Add("v1", stat.etag, source="v1.tmp"), Delete("v1.tmp")]) == []
    assert read(backend, "v1") == b"one"
    assert backend.stat("v1.tmp") is None


def test_a_passing_trouble_is_tried_again_and_a_lasting_one_is_eio(hub: RunningHub, backend: HubBackend) -> None:
    hub.add_fault(kind="status", status=503, times=2)
    assert backend.list_folder("") == backend.list_folder("")
    hub.add_fault(kind="status", status=503, times=None)
    with pytest.raises(OSError) as raised:
        backend.stat("v1")
    assert raised.value.errno == errno.EIO


def test_a_wrong_token_and_a_missing_bucket_are_refused_at_once(hub: RunningHub, backend: HubBackend) -> None:
    for source, token in ((BUCKET, "hf_wrong"), ("me/nothing", hub.token)):
        with pytest.raises(OSError):
            HubBackend(source, endpoint=hub.endpoint, token=token)
    with pytest.raises(ValueError, match="not a bucket id"):
        HubBackend("rl", endpoint=hub.endpoint, token=hub.token)


def test_a_read_token_cannot_write(hub: RunningHub, backend: HubBackend, tmp_path: Path) -> None:
    reader = HubBackend(BUCKET, endpoint=hub.endpoint, token=hub.read_token)
    (tmp_path / "staged").write_bytes(b"one")
    with pytest.raises(OSError):
        reader.upload(tmp_path / "staged", "v1")
    with pytest.raises(OSError) as raised:
        reader.commit([Delete("v1")])
    assert raised.value.errno == errno.EACCES


@needs_fuse
def test_two_mounts_of_one_bucket_hand_a_version_over(
    hub: RunningHub, backend: HubBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    mounts = Mounts(tmp_path)
    try:
        trainer = mounts.mount("trainer", "--endpoint", hub.endpoint, source=BUCKET)
        replica = mounts.mount("replica", "--endpoint", hub.endpoint, "--read-only", source=BUCKET)
        data = os.urandom(5_000_000)
        start = time.monotonic()
        (trainer.path / "run").mkdir()
        (trainer.path / "run" / "v1.safetensors").write_bytes(data)
        wait_for(lambda: hub.paths(BUCKET) == ["run/v1.safetensors"])
        assert time.monotonic() - start >= 0.2
        assert (replica.path / "run" / "v1.safetensors").read_bytes() == data
        assert trainer.stop() == 0
    finally:
        mounts.close()
