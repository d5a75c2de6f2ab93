"""The mount as a process: start, say `mounted PATH`, serve, flush and unmount on SIGTERM.

Exit codes: 0 after a clean unmount, 2 for bad arguments, 3 where FUSE can't be had.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from bucket_grpo.emulator.backends import Backend
from bucket_grpo.emulator.faults import FaultControl
from bucket_grpo.emulator.mount_fs import BucketMount
from bucket_grpo.emulator.profiles import MountProfile

NO_FUSE = 3
_PR_SET_PDEATHSIG = 1
_MOUNT_TIMEOUT_S = 20.0


class FuseUnavailableError(Exception):
    """FUSE can't be had here; the message says why and what to do."""


def run_mount(
    backend: Backend, source: str, path: Path, profile: MountProfile, *, read_only: bool, control: FaultControl
) -> int:
    """Mount `backend` at `path` and serve until SIGTERM, SIGINT, an unmount from outside, or our parent's death."""
    stop = stop_on_signals()
    try:
        return _serve(backend, source, path, profile, read_only=read_only, control=control, stop=stop)
    except FuseUnavailableError as error:
        print(f"cannot mount {path}: {error}", file=sys.stderr, flush=True)
        return NO_FUSE


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM, SIGINT and SIGHUP set, and the death of our parent."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    parent = os.getppid()

    def look_for_parent(*_: object) -> None:
        # The kernel also sends this when only the thread that started us has ended.
        if os.getppid() != parent:
            stop.set()

    signal.signal(signal.SIGUSR1, look_for_parent)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    look_for_parent()  # it may have died before we asked
    return stop


def _serve(
    backend: Backend,
    source: str,
    path: Path,
    profile: MountProfile,
    *,
    read_only: bool,
    control: FaultControl,
    stop: threading.Event,
) -> int:
    _check_fuse()
    from bucket_grpo.emulator.fuse_ops import BucketOperations, serve_fuse

    _clear_stale_mount(path)
    path.mkdir(parents=True, exist_ok=True)
    mount = BucketMount(backend, profile, read_only=read_only, control=control)
    operations = BucketOperations(mount)
    failure: list[Exception] = []

    def serve() -> None:
        try:
            serve_fuse(operations, str(path), kernel_ttl_s=profile.kernel_ttl_s, read_only=read_only, source=source)
        except RuntimeError as error:  # libfuse has said why on stderr
            failure.append(error)
        stop.set()

    mount.start()
    server = threading.Thread(target=serve, name="fuse", daemon=True)
    server.start()
    try:
        if not _wait_until(lambda: operations.ready.is_set() or bool(failure), _MOUNT_TIMEOUT_S) or failure:
            raise FuseUnavailableError(_mount_failed(failure))
        print(f"mounted {path}", flush=True)
        stop.wait()
    finally:
        mount.stop()
        if operations.ready.is_set():
            _unmount(path)
            server.join(1.0)
    return 0


def _mount_failed(failure: list[Exception]) -> str:
    if failure:
        return f"libfuse gave up ({failure[0]}); it needs CAP_SYS_ADMIN or a set-uid fusermount3. Try --no-fuse."
    return f"libfuse did not answer within {_MOUNT_TIMEOUT_S:g} s. Try --no-fuse."


def _check_fuse() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        raise FuseUnavailableError(
            f"/dev/fuse: {error.strerror} (in a container: --device /dev/fuse --cap-add SYS_ADMIN). Try --no-fuse."
        ) from None
    if shutil.which("fusermount3") is None:
        raise FuseUnavailableError("no fusermount3 (Debian: apt-get install fuse3). Try --no-fuse.")
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError, AttributeError) as error:
        raise FuseUnavailableError(f"mfusepy does not load ({error}). Try --no-fuse.") from None


def _clear_stale_mount(path: Path) -> None:
    """A mount whose process was killed answers ENOTCONN to everything: unmount it first."""
    try:
        path.stat()
    except FileNotFoundError:
        return
    except OSError:
        _unmount(path)
        return
    if os.path.ismount(path):
        raise FuseUnavailableError("something is mounted there already; unmount it first (fusermount3 -u)")


def _unmount(path: Path) -> None:
    """Unmount; if somebody still has a file open there, let the name go now and the rest when he closes it."""
    for flags in ("-uq", "-uzq"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            if subprocess.run(["fusermount3", flags, str(path)], timeout=10, check=False).returncode == 0:
                return


def _wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    waited = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if done():
            return True
        waited.wait(0.01)
    return done()
