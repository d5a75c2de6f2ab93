"""Child processes that end with their parent, whatever ends it, and that are stopped as a whole tree."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(sig: int = signal.SIGTERM) -> None:
    """Ask the kernel to send `sig` to this process when its parent dies (Linux; elsewhere a no-op)."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, sig, 0, 0, 0)


class Child:
    """A process in a session of its own, its output in a log file.

    `stop` first asks (SIGTERM), then ends the whole process group (SIGKILL); it returns the exit status.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, log_path: Path) -> None:
        self.process = process
        self.name = name
        self.log_path = log_path
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def terminate(self) -> None:
        """Ask it to stop, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    def stop(self, grace_s: float = 10.0) -> int:
        """SIGTERM, wait up to `grace_s` seconds, then SIGKILL what is left of its process group."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait(10)

    def tail(self, lines: int = 20) -> str:
        """The last `lines` lines of its log."""
        return tail(self.log_path, lines)


def spawn(
    command: Sequence[str],
    *,
    name: str,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    stdout: int | IO[bytes] | None = None,
) -> Child:
    """Start `command` in its own session, appending its output to `log_path`; it gets SIGTERM if we die.

    Call it from a thread that lives as long as the process: the kernel counts the death of the starting thread.
    `env` replaces the environment; pass `{**os.environ, …}` to extend it. Raises `OSError` if it cannot be started.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def before_exec() -> None:
        end_with_parent()
        if os.getppid() != parent:  # the parent died between fork and prctl
            os.kill(os.getpid(), signal.SIGTERM)

    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else log,
            stderr=log,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
            preexec_fn=before_exec,
        )
    return Child(process, name, log_path)


def tail(path: Path, lines: int = 20) -> str:
    """The last `lines` lines of a text file; an empty string where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 400 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def raise_file_limit() -> None:
    """Allow as many open files as this user may have: each request in flight holds two sockets."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago. Where it matters, hold a listening socket instead."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
