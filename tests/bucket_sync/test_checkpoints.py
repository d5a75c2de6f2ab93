import json
import os
from pathlib import Path

import pytest

from bucket_grpo.bucket_sync.checkpoint_uploader import CheckpointFailed, CheckpointUploader
from bucket_grpo.bucket_sync.checkpoints import (
    CheckpointRejected,
    list_checkpoints,
    prune_checkpoints,
    restore_checkpoint,
    save_checkpoint,
)
from bucket_grpo.bucket_sync.current import Superseded, claim
from bucket_grpo.bucket_sync.stores import MountedStore, StoreError

OLD, MINE, NEWER = "20261101t000000z-aaaaaa", "20261130t154500z-a1b2c3", "20261130t164500z-bbbbbb"
WHO = {"run": "run", "incarnation": MINE}


@pytest.fixture
def store(tmp_path: Path) -> MountedStore:
    (tmp_path / "bucket").mkdir()
    return MountedStore(tmp_path / "bucket")


def checkpoint(folder: Path, step: int) -> Path:
    """What a trainer leaves: nested, with a hidden file, an empty one and two of the same content."""
    for name, content in {
        "trainer_state.json": json.dumps({"step": step}).encode(),
        "optimizer/.metadata": b"meta",
        "optimizer/0.distcp": os.urandom(1000),
        "empty": b"",
        "copy_of_meta": b"meta",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_comes_back_byte_for_byte(store, tmp_path):
    source = checkpoint(tmp_path / "checkpoint-50", 50)
    save_checkpoint(store, source, step=50, **WHO)
    restored = restore_checkpoint(store, "run", tmp_path / "resumed")
    assert (restored.step, restored.incarnation, restored.passed_over) == (50, MINE, {})
    assert tree(restored.folder) == tree(source)
    with pytest.raises(FileExistsError):
        restore_checkpoint(store, "run", tmp_path / "resumed")


def test_a_run_without_checkpoints_starts_anew(store, tmp_path):
    assert restore_checkpoint(store, "run", tmp_path / "resumed") is None
    assert not (tmp_path / "resumed").exists()


def test_the_newest_is_the_highest_step_of_the_latest_incarnation(store, tmp_path):
    for incarnation, step in ((OLD, 50), (OLD, 100), (MINE, 60)):
        save_checkpoint(
            store, checkpoint(tmp_path / f"{incarnation}-{step}", step), run="run", incarnation=incarnation, step=step
        )
    assert [key.split("/", 2)[2] for key in list_checkpoints(store, "run")] == [
        f"{MINE}/step-000060.json", f"{OLD}/step-000100.json", f"{OLD}/step-000050.json",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "manifest gone"])
def test_resume_takes_the_newest_that_verifies(store, tmp_path, damage):
    for step in (50, 100):
        manifest = save_checkpoint(store, checkpoint(tmp_path / str(step), step), step=step, **WHO)
    shard = next(file for file in manifest.files if file.path == "optimizer/0.distcp")
    path = store.path / manifest.folder / shard.sha256
    if damage == "flip":
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "delete":
        path.unlink()
    elif damage == "manifest":
        text = (store.path / manifest.key).read_text()
        (store.path / manifest.key).write_text(text.replace("copy_of_meta", "copy_of_mata"))
    else:
        (store.path / manifest.key).unlink()
    restored = restore_checkpoint(store, "run", tmp_path / "resumed")
    assert restored.step == 50
    assert list(restored.passed_over) == [manifest.key]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_if_none_verifies_the_reasons_are_said(store, tmp_path):
    manifest = save_checkpoint(store, checkpoint(tmp_path / "50", 50), step=50, **WHO)
    (store.path / manifest.key).write_text("{}")
    with pytest.raises(CheckpointRejected, match=r"none of the 1 checkpoints of run verifies: .*not a digest list"):
        restore_checkpoint(store, "run", tmp_path / "resumed")


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "a/../../evil", "", ".", "a//b"])
def test_a_path_that_climbs_out_is_refused(store, tmp_path, path):
    manifest = save_checkpoint(store, checkpoint(tmp_path / "50", 50), step=50, **WHO)
    hostile = manifest.model_copy(update={"files": [manifest.files[0].model_copy(update={"path": path})]})
    hostile.digest = hostile.expected_digest()
    (store.path / manifest.key).write_text(hostile.model_dump_json())
    with pytest.raises(CheckpointRejected, match="not a path inside"):
        restore_checkpoint(store, "run", tmp_path / "deep" / "resumed")
    assert not (tmp_path / "deep" / "evil").exists()


class Crashing(MountedStore):
    """Dies at its n-th write."""

    writes_left = 0

    def write_once(self, key: str, data: bytes) -> None:
        self._count()
        super().write_once(key, data)

    def write_pointer(self, key: str, data: bytes) -> None:
        self._count()
        super().write_pointer(key, data)

    def _count(self) -> None:
        self.writes_left -= 1
        if self.writes_left < 0:
            raise KeyboardInterrupt("the machine is gone")


def test_a_crash_at_any_write_leaves_an_earlier_checkpoint_to_resume_from(store, tmp_path):
    save_checkpoint(store, checkpoint(tmp_path / "50", 50), step=50, **WHO)
    crashing = Crashing(store.path)
    for writes in range(7):
        crashing.writes_left = writes
        step = 100 + writes
        source = checkpoint(tmp_path / str(step), step)
        completed = True
        try:
            save_checkpoint(crashing, source, step=step, **WHO)
        except KeyboardInterrupt:
            completed = False
        restored = restore_checkpoint(store, "run", tmp_path / f"resumed-{writes}")
        expected = source if restored.step == step else tmp_path / str(50)
        assert tree(restored.folder) == tree(expected)
        assert restored.passed_over == {}
        if not completed:
            assert restored.step == 50 or writes >= 5
            prune = [key for key in list_checkpoints(store, "run") if "step-000050" not in key]
            store.delete(prune)
    assert completed


def test_a_superseded_trainer_does_not_move_the_pointer(store, tmp_path):
    save_checkpoint(store, checkpoint(tmp_path / "50", 50), run="run", incarnation=NEWER, step=50)
    claim(store, "run", NEWER)
    before = store.read("run/checkpoints/latest.json")
    with pytest.raises(Superseded):
        save_checkpoint(store, checkpoint(tmp_path / "60", 60), step=60, **WHO)
    assert store.read("run/checkpoints/latest.json") == before


def test_pruning_is_exact(store, tmp_path):
    for step in (1, 10, 100):
        save_checkpoint(store, checkpoint(tmp_path / str(step), step), step=step, **WHO)
    save_checkpoint(store, checkpoint(tmp_path / "other", 1), run="run-2", incarnation=MINE, step=1)
    before = {info.key for info in store.list("")}
    deleted = prune_checkpoints(store, "run", MINE, keep=2)
    assert {info.key for info in store.list("")} == before - set(deleted)
    assert all("/step-000001" in key and key.startswith("run/") for key in deleted)
    assert restore_checkpoint(store, "run", tmp_path / "resumed").step == 100


def test_what_is_no_plain_file_is_refused(store, tmp_path):
    source = checkpoint(tmp_path / "50", 50)
    (source / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="not a plain file"):
        save_checkpoint(store, source, step=50, **WHO)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="no files"):
        save_checkpoint(store, tmp_path / "nothing", step=50, **WHO)


def test_uploads_go_on_behind_and_survive_the_trainers_rotation(store, tmp_path):
    uploader = CheckpointUploader(store, "run", MINE, tmp_path / "spool", keep=2)
    contents = {}
    for step in (50, 100, 150, 200):
        source = checkpoint(tmp_path / "out" / f"checkpoint-{step}", step)
        contents[step] = tree(source)
        uploader.submit(source, step)
        for path in sorted(source.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    uploader.close(timeout=10)
    assert uploader.uploaded[-1] == 200
    assert len(uploader.uploaded) + uploader.skipped == 4
    restored = restore_checkpoint(store, "run", tmp_path / "resumed")
    assert tree(restored.folder) == contents[200]
    assert len(list_checkpoints(store, "run")) <= 2
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_checkpoint_that_did_not_get_there_is_said_once_at_the_next(store, tmp_path, monkeypatch):
    def full(key: str, data: bytes) -> None:
        raise StoreError("No space left on device")

    source = checkpoint(tmp_path / "out", 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_once", full)
        uploader = CheckpointUploader(store, "run", MINE, tmp_path / "spool")
        uploader.submit(source, 1)
        with pytest.raises(CheckpointFailed, match="No space left"):
            uploader.close(timeout=10)
    again = CheckpointUploader(store, "run", MINE, tmp_path / "spool")
    again.submit(source, 1)
    again.close(timeout=10)
    assert again.uploaded == [1]
