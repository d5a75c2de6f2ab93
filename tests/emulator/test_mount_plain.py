"""The plain folder that stands in for a mount where FUSE can't be had: the same waiting, said honestly."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mount_processes import COMMAND, Mounts, wait_for

from bucket_grpo.emulator.mount_plain import Mirror, Move
from bucket_grpo.emulator.profiles import PROFILES

HF = PROFILES["hf-mount-2026-09"]
ONE, TWO = (1, 1, 1), (2, 2, 2)


def test_a_written_file_is_pushed_after_it_stood_still_for_a_debounce() -> None:
    mirror = Mirror(HF)
    assert mirror.due(0.0, {"v1": ONE}, {}) == []
    assert mirror.due(1.9, {"v1": TWO}, {}) == [], "it was written again"
    assert mirror.due(3.8, {"v1": TWO}, {}) == []
    assert mirror.due(3.9, {"v1": TWO}, {}) == [(Move.PUSH, "v1")]


def test_a_new_object_arrives_after_the_negative_cache_time_and_a_changed_one_after_revalidation() -> None:
    mirror = Mirror(HF)
    assert mirror.due(0.0, {}, {"v1": "a"}) == []
    assert mirror.due(1.0, {}, {"v1": "a"}) == [(Move.PULL, "v1")]
    mirror.synced["v1"] = (ONE, "a")
    assert mirror.due(2.0, {"v1": ONE}, {"v1": "b"}) == []
    assert mirror.due(11.9, {"v1": ONE}, {"v1": "b"}) == []
    assert mirror.due(12.0, {"v1": ONE}, {"v1": "b"}) == [(Move.PULL, "v1")]


def test_deletions_travel_both_ways_and_are_forgotten_once_agreed() -> None:
    mirror = Mirror(HF, synced={"here": (ONE, "a"), "there": (ONE, "a")})
    here, there = {"there": ONE}, {"here": "a"}
    mirror.due(0.0, here, there)
    assert mirror.due(10.0, here, there) == [(Move.DELETE_THERE, "here"), (Move.DELETE_HERE, "there")]
    assert mirror.due(11.0, {}, {}) == []
    assert mirror.synced == {}
    mirror.due(12.0, {}, {"here": "b"})
    assert mirror.due(13.0, {}, {"here": "b"}) == [(Move.PULL, "here")], "a new object is no remnant"


def test_a_reader_pushes_nothing() -> None:
    mirror = Mirror(HF, read_only=True)
    mirror.due(0.0, {"mine": ONE}, {})
    assert mirror.due(99.0, {"mine": ONE}, {}, force=True) == []


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.close()


def test_a_file_written_here_arrives_there_and_a_clean_end_pushes_the_rest(mounts: Mounts) -> None:
    writer, reader = mounts.mount("writer", "--no-fuse"), mounts.mount("reader", "--no-fuse", "--read-only")
    start = time.monotonic()
    (writer.path / "run").mkdir()
    (writer.path / "run" / "v1").write_bytes(b"x" * 1_000_000)
    wait_for((reader.path / "run" / "v1").exists)
    assert time.monotonic() - start >= 0.2
    assert (reader.path / "run" / "v1").read_bytes() == b"x" * 1_000_000
    (writer.path / "late").write_text("late")
    assert writer.stop() == 0
    assert (mounts.objects / "late").read_text() == "late"
    assert (mounts.objects / "run" / "v1").exists(), "emptying the folder deletes nothing"
    assert list(writer.path.iterdir()) == []
    assert reader.stop() == 0


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis").write_text("mine")
    done = subprocess.run(
        [*COMMAND, "--no-fuse", str(tmp_path / "objects"), str(tmp_path / "used")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert (tmp_path / "used" / "thesis").read_text() == "mine"
