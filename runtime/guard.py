"""`python -m bucket_grpo.runtime.guard -- command…`: run a command and end everything it started when it or we end.

vLLM starts engine processes of its own. If only the process that we know is killed, they live on and keep the memory
and the GPU. The guard adopts orphans (child subreaper) and, when its parent dies, when it gets SIGTERM, or when the
command exits, ends every descendant: SIGTERM to the command, a grace period, then SIGKILL to whatever is left.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from bucket_grpo.runtime.processes import end_with_parent

PR_SET_CHILD_SUBREAPER = 36


def descendants(root: int) -> list[int]:
    """Process ids of everything below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def end_descendants() -> None:
    """SIGKILL every descendant and collect it. Repeats, since one may start another while we look."""
    for _ in range(50):
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def main() -> int:
    arguments = sys.argv[1:]
    grace_s = 10.0
    if arguments[:1] == ["--grace"]:
        grace_s, arguments = float(arguments[1]), arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        print("usage: python -m bucket_grpo.runtime.guard [--grace SECONDS] -- command…", file=sys.stderr)
        return 2
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_with_parent(signal.SIGTERM)

    asked = False

    def ask(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    command = subprocess.Popen(arguments)
    deadline: float | None = None
    while command.poll() is None:
        if asked and deadline is None:
            command.terminate()
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.1)
    status = command.poll()
    end_descendants()
    return 128 + signal.SIGKILL if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
