"""No child outlives its parent, and a stopped child leaves nothing of its tree behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bucket_grpo.runtime.processes import spawn

TREE = """
import subprocess, sys, time
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(inner.pid))
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def written_pid(path: Path) -> int:
    assert eventually(lambda: path.exists() and path.read_text() != "")
    return int(path.read_text())


def test_a_guarded_tree_ends_with_stop(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = spawn(
        [sys.executable, "-m", "bucket_grpo.runtime.guard", "--", sys.executable, "-c", TREE, str(pid_file)],
        name="tree",
        log_path=tmp_path / "log",
    )
    inner = written_pid(pid_file)
    child.stop()
    assert eventually(lambda: not alive(inner))


def test_a_guarded_tree_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import sys, time; from pathlib import Path; from bucket_grpo.runtime.processes import spawn\n"
        "spawn([sys.executable, '-m', 'bucket_grpo.runtime.guard', '--', sys.executable, '-c', *sys.argv[1:3]],"
        " name='x', log_path=Path(sys.argv[3]))\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, TREE, str(pid_file), str(tmp_path / "log")])
    inner = written_pid(pid_file)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert eventually(lambda: not alive(inner))


def test_a_guarded_tree_ends_when_its_command_dies(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = spawn(
        [sys.executable, "-m", "bucket_grpo.runtime.guard", "--", sys.executable, "-c", TREE, str(pid_file)],
        name="tree",
        log_path=tmp_path / "log",
    )
    inner = written_pid(pid_file)
    parent_of_inner = int(Path(f"/proc/{inner}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent_of_inner, signal.SIGKILL)
    assert child.wait(15) == 128 + signal.SIGKILL
    assert eventually(lambda: not alive(inner))


def test_the_log_holds_the_output(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", "print('one'); print('two')"], name="p", log_path=tmp_path / "log")
    assert child.wait(15) == 0
    assert child.tail(1) == "two"
