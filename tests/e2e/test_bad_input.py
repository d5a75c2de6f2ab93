"""What a user can get wrong is one clear line and a failure within seconds, and nothing is left behind."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import assert_nothing_left

DEMO = [sys.executable, "-m", "bucket_grpo.cli.main", "demo"]


def run_demo(*options: str) -> tuple[int, str, float]:
    """Exit status, the last line said, seconds."""
    started = time.monotonic()
    result = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=60)
    said = (result.stdout + result.stderr).strip().splitlines()
    assert "Traceback" not in "".join(said)
    return result.returncode, said[-1], time.monotonic() - started


def with_lines(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    file = with_lines(
        tmp_path / "run.yaml",
        "run_name: x\nmodel_name_or_path: ./no-such-model\ndataset_name: builtin:addition\nreward_funcs: a.b:c\n",
    )
    status, said, seconds = run_demo(file, "--run-dir", str(tmp_path / "run"))
    assert status == 1
    assert "no-such-model" in said
    assert seconds < 30
    assert_nothing_left(tmp_path / "run")


def test_an_unknown_key_is_shown_with_its_line_and_the_nearest_known_one(tmp_path: Path) -> None:
    file = with_lines(tmp_path / "run.yaml", "run_name: x\nmodel_name_or_path: builtin:tiny\nlearning_rat: 1e-3\n")
    status, said, seconds = run_demo(file, "--run-dir", str(tmp_path / "run"))
    assert status == 1
    assert "run.yaml:3" in said
    assert "learning_rat" in said
    assert "learning_rate" in said.replace("'learning_rat'", "")
    assert seconds < 30


def test_a_port_in_use_is_named_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said, seconds = run_demo("--port", str(port), "--run-dir", str(tmp_path / "run"))
    assert status == 1
    assert f"port {port}" in said
    assert "in use" in said
    assert seconds < 30
    assert_nothing_left(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk")
def test_a_full_disk_under_the_bucket_is_said_before_anything_is_started(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        status, said, seconds = run_demo("--run-dir", str(disk / "run"))
        assert status == 1
        assert "free" in said
        assert str(disk) in said
        assert seconds < 30
        assert_nothing_left(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
