"""The mount through the kernel: what a trainer and a replica on two machines would see."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mount_processes import COMMAND, Mounts, needs_fuse, wait_for
from safetensors import safe_open
from safetensors.numpy import save_file

pytestmark = needs_fuse


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.close()


def test_a_file_written_here_is_read_there_after_the_debounce(mounts: Mounts) -> None:
    trainer, replica = mounts.mount("trainer"), mounts.mount("replica", "--read-only")
    start = time.monotonic()
    (trainer.path / "run").mkdir()
    (trainer.path / "run" / "v1").write_bytes(b"x" * 5_000_000)
    assert (trainer.path / "run" / "v1").stat().st_size == 5_000_000
    assert not (mounts.objects / "run").exists(), "close() does not wait for the bucket"
    wait_for((mounts.objects / "run" / "v1").exists)
    assert time.monotonic() - start >= 0.2
    assert (replica.path / "run" / "v1").read_bytes() == b"x" * 5_000_000
    assert os.listdir(replica.path / "run") == ["v1"]


def test_an_early_probe_hides_a_version_for_the_negative_cache_time(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer")
    old = mounts.mount("old", "--read-only", "--profile", "hf-mount-2026-08", "--set", "poll_s=1000")
    new = mounts.mount("new", "--read-only")
    probed = time.monotonic()
    assert not (old.path / "v1").exists()
    (trainer.path / "v1").write_bytes(b"one")
    wait_for((mounts.objects / "v1").exists)
    wait_for((new.path / "v1").exists, timeout_s=2.0)
    assert not (old.path / "v1").exists(), "committed, and still hidden"
    wait_for((old.path / "v1").exists)
    assert time.monotonic() - probed >= 3.0


def test_a_changed_file_is_seen_after_the_revalidation_time_and_no_sooner(mounts: Mounts) -> None:
    mounts.objects.mkdir()
    (mounts.objects / "current.json").write_text("first")
    reader = mounts.mount("reader", "--read-only", time_scale=0.2)
    file = reader.path / "current.json"
    assert file.read_text() == "first"
    read_at = time.monotonic()
    os.replace(_file(mounts.tmp_path / "next", "second"), mounts.objects / "current.json")
    assert file.read_text() == "first"
    wait_for(lambda: file.read_text() == "second")
    assert time.monotonic() - read_at >= 1.9


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_listing_shows_news_after_a_poll_while_a_lookup_finds_them_at_once(mounts: Mounts) -> None:
    mounts.objects.mkdir()
    (mounts.objects / "v1").write_text("1")
    unpolled = mounts.mount("unpolled", "--read-only", "--set", "poll_s=1000")
    polled = mounts.mount("polled", "--read-only", "--set", "poll_s=5")
    assert os.listdir(unpolled.path) == os.listdir(polled.path) == ["v1"]
    (mounts.objects / "v2").write_text("2")
    wait_for(lambda: sorted(os.listdir(polled.path)) == ["v1", "v2"])
    assert os.listdir(unpolled.path) == ["v1"]
    assert (unpolled.path / "v2").read_text() == "2"


def test_a_read_only_mount_is_erofs(mounts: Mounts) -> None:
    mounts.objects.mkdir()
    (mounts.objects / "v1").write_text("1")
    reader = mounts.mount("reader", "--read-only")
    for change in (
        lambda: (reader.path / "new").write_text("x"),
        lambda: (reader.path / "v1").write_text("x"),
        lambda: (reader.path / "v1").unlink(),
        lambda: (reader.path / "d").mkdir(),
        lambda: (reader.path / "v1").rename(reader.path / "v2"),
    ):
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EROFS


def test_sigterm_flushes_unmounts_and_ends_with_zero(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", time_scale=1.0)
    (trainer.path / "v1").write_text("one")
    assert trainer.stop() == 0
    assert (mounts.objects / "v1").read_text() == "one"
    assert not os.path.ismount(trainer.path)
    assert os.listdir(trainer.path) == []


def test_sigterm_ends_a_mount_that_somebody_still_uses(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer")
    descriptor = os.open(trainer.path / "v1", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"one")
    assert trainer.stop() == 0
    assert not os.path.ismount(trainer.path)
    assert (mounts.objects / "v1").read_text() == "one"
    with pytest.raises(OSError) as raised:
        os.close(descriptor)
    assert raised.value.errno == errno.ENOTCONN


def test_sigkill_loses_what_was_not_flushed_and_the_next_mount_clears_the_path(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", time_scale=1.0)
    (trainer.path / "v1").write_text("one")
    trainer.kill()
    with pytest.raises(OSError) as raised:
        os.listdir(trainer.path)
    assert raised.value.errno == errno.ENOTCONN
    again = mounts.mount("trainer")
    assert os.listdir(again.path) == []
    assert not (mounts.objects / "v1").exists()


def test_a_mount_outlives_the_thread_that_started_it_but_not_the_process(mounts: Mounts) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *COMMAND, str(mounts.objects), str(mounts.tmp_path / "m")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    wait_for(lambda: os.path.ismount(mounts.tmp_path / "m"))
    parent.send_signal(signal.SIGUSR1)  # ends the thread
    assert parent.stdout.readline() == "thread ended\n"
    time.sleep(0.5)
    assert os.path.ismount(mounts.tmp_path / "m")
    parent.kill()
    parent.wait(10)
    wait_for(lambda: not os.path.ismount(mounts.tmp_path / "m"))
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


PARENT = """
import signal, subprocess, sys, threading, time
ended = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: ended.set())
def start():
    print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, flush=True)
    ended.wait()
thread = threading.Thread(target=start)
thread.start()
while not ended.wait(0.1):
    pass
thread.join()
print("thread ended", flush=True)
time.sleep(60)
"""


def test_safetensors_are_read_through_mmap(mounts: Mounts) -> None:
    weights = {"a": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "b": np.ones(7, dtype=np.float32)}
    mounts.objects.mkdir()
    save_file(weights, mounts.objects / "v1.safetensors")
    reader = mounts.mount("reader", "--read-only")
    with safe_open(reader.path / "v1.safetensors", framework="numpy") as file:
        for name, expected in weights.items():
            np.testing.assert_array_equal(file.get_tensor(name), expected)
    with (reader.path / "v1.safetensors").open("rb") as raw, mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == (mounts.objects / "v1.safetensors").read_bytes()


def test_a_failed_commit_is_eio_on_the_next_close(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", "--fault", "fail_commits=1")
    file = trainer.path / "v1"
    file.write_text("one")
    wait_for(lambda: "failed and is not tried again" in "".join(trainer.errors))
    with pytest.raises(OSError) as raised:
        file.read_text()
    assert raised.value.errno == errno.EIO
    assert file.read_text() == "one", "told once; the file is still only here"
    assert not (mounts.objects / "v1").exists()


def test_fsync_returns_before_the_bucket_has_anything(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", time_scale=1.0)
    with (trainer.path / "v1").open("w") as file:
        file.write("one")
        file.flush()
        start = time.monotonic()
        os.fsync(file.fileno())
        assert time.monotonic() - start < 1.0
    assert not (mounts.objects / "v1").exists()


def test_an_open_file_can_be_unlinked_and_written_on(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer")
    with (trainer.path / "v1").open("w+") as file:
        file.write("one")
        file.flush()
        (trainer.path / "v1").unlink()
        file.write(" two")
        file.seek(0)
        assert file.read() == "one two"
    time.sleep(0.6)
    assert os.listdir(trainer.path) == []
    assert not (mounts.objects / "v1").exists()


def test_deleting_a_committed_file_reaches_the_bucket(mounts: Mounts) -> None:
    mounts.objects.mkdir()
    for key in ("v1", "v10"):
        (mounts.objects / key).write_text(key)
    trainer = mounts.mount("trainer")
    (trainer.path / "v1").unlink()
    wait_for(lambda: not (mounts.objects / "v1").exists())
    assert (mounts.objects / "v10").read_text() == "v10"


def test_reads_fail_when_the_control_file_says_so(mounts: Mounts) -> None:
    mounts.objects.mkdir()
    (mounts.objects / "v1").write_text("one")
    faults = mounts.tmp_path / "faults.json"
    reader = mounts.mount("reader", "--read-only", "--control", str(faults))
    faults.write_text('{"fail_reads": "1/1"}')
    with pytest.raises(OSError) as raised:
        (reader.path / "v1").read_text()
    assert raised.value.errno == errno.EIO
    faults.unlink()
    assert (reader.path / "v1").read_text() == "one"


def test_without_fusermount3_there_is_one_clear_line_and_exit_code_3(tmp_path: Path) -> None:
    command = [*COMMAND, str(tmp_path / "objects"), str(tmp_path / "m")]
    done = subprocess.run(
        command, env={**os.environ, "PATH": "/nonexistent"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "fusermount3" in done.stderr
    assert "--no-fuse" in done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--profile", "hf-mount-1999"], "hf-mount-2026-09"),
        (["--time-scale", "0"], "local"),
        (["--fault", "nonsense=1"], "Known faults"),
        (["--set", "poll=3"], "poll_s"),
    ],
)
def test_wrong_flags_are_refused_with_what_is_known(tmp_path: Path, flags: list[str], complaint: str) -> None:
    done = subprocess.run(
        [*COMMAND, str(tmp_path / "o"), str(tmp_path / "m"), *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert complaint in done.stderr


def test_a_path_that_is_mounted_already_is_left_alone(mounts: Mounts) -> None:
    first = mounts.mount("m")
    done = subprocess.run(
        [*COMMAND, str(mounts.objects), str(first.path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    assert "mounted there already" in done.stderr
    assert os.path.ismount(first.path)


def test_sigint_is_a_clean_end_too(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", time_scale=1.0)
    (trainer.path / "v1").write_text("one")
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.process.wait(30) == 0
    assert (mounts.objects / "v1").read_text() == "one"


@pytest.mark.e2e
def test_unscaled_a_version_is_in_the_bucket_after_two_and_a_half_seconds_and_there_at_once(mounts: Mounts) -> None:
    trainer = mounts.mount("trainer", time_scale=1.0)
    replica = mounts.mount("replica", "--read-only", time_scale=1.0)
    start = time.monotonic()
    (trainer.path / "v1").write_bytes(b"x" * 5_000_000)
    assert time.monotonic() - start < 0.5
    wait_for((mounts.objects / "v1").exists)
    assert 2.4 <= time.monotonic() - start <= 3.5
    assert (replica.path / "v1").read_bytes() == b"x" * 5_000_000
    assert time.monotonic() - start <= 4.0
