"""The first process of an emulated job: a root of its own, its volumes, its network, then the job's command.

Started by the emulated Hub with a status pipe. It says `unshared` there once its namespaces exist, reads one line of
JSON from stdin (`Inside`), says `started` or `failed: <why>`, and ends with the command's exit status. Inside, the
command sees the same files as the machine, but an own `/tmp`, an own `/proc`, port numbers that nobody else has, and
its volumes at the paths that were asked for. With `namespaces` off it is a plain process tree with mapped paths.

Only the standard library is used: this runs before anything else of the job does.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
MS_REC, MS_PRIVATE, MS_BIND = 0x4000, 0x40000, 0x1000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MOUNT_TIMEOUT_S = 30.0
NO_FUSE = 3
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Inside:
    """What the first process is told. `volumes`: dicts with `source`, `path`, `read_only`."""

    command: list[str]
    env: dict[str, str]
    mount_env: dict[str, str]
    volumes: list[dict[str, Any]]
    mount_options: list[str]
    folder: str
    address: str | None
    stop_grace_s: float
    flush_grace_s: float


class CannotStart(Exception):
    """The job cannot be started; the message becomes its status message."""


def _call(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise CannotStart(f"{what}: {os.strerror(number)}")


def unshare_all() -> None:
    _call(_LIBC.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, what: str) -> None:
    kind_bytes = kind.encode() if kind else None
    _call(_LIBC.mount(source.encode(), target.encode(), kind_bytes, flags, None), what)


def build_root(root: Path, private_tmp: Path, keep: list[Path], volumes: list[str]) -> None:
    """Make `root` look like `/` with an own /tmp, /proc and /etc/hosts, and empty folders where volumes will be."""
    mount("none", "/", None, MS_REC | MS_PRIVATE, "making mounts private")
    root.mkdir(parents=True, exist_ok=True)
    mount("job-root", str(root), "tmpfs", 0, f"tmpfs on {root}")
    for entry in Path("/").iterdir():
        target = root / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir():
            target.mkdir()
            if entry.name not in ("proc", "tmp"):
                _bind(entry, target)
    mount("proc", str(root / "proc"), "proc", 0, "mounting /proc")
    _bind(private_tmp, root / "tmp")
    for path in keep:
        if path.is_relative_to("/tmp"):
            target = root / path.relative_to("/")
            target.mkdir(parents=True, exist_ok=True)
            _bind(path, target)
    # The Hub rewrites this file in place when members of the job's network group come and go.
    _bind(private_tmp.parent / "hosts", root / "etc" / "hosts")
    for volume in volumes:
        (root / volume.lstrip("/")).mkdir(parents=True, exist_ok=True)


def _bind(source: Path, target: Path) -> None:
    mount(str(source), str(target), None, MS_BIND | MS_REC, f"binding {source}")


def set_up_network(address: str) -> None:
    """`eth0` was put here by the Hub; the Hub's own address is in the same subnet."""
    for arguments in (
        ["link", "set", "lo", "up"],
        ["addr", "add", address, "dev", "eth0"],
        ["link", "set", "eth0", "up"],
    ):
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotStart(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Job:
    """The command and its mounts, in the process that is their parent."""

    def __init__(self, inside: Inside, status: int) -> None:
        self.inside = inside
        self.status = status
        self.mounts: list[subprocess.Popen[str]] = []
        self.command: subprocess.Popen[bytes] | None = None
        self.asked_to_stop = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        try:
            for volume in self.inside.volumes:
                self.mounts.append(self._mount(volume))
            self.command = self._start_command()
        except CannotStart as error:
            self._say(f"failed: {error}")
            self._end_mounts()
            return 1
        self._say("started")
        if self.asked_to_stop:
            self.command.terminate()
        status = self._wait()
        self._end_mounts()
        return status if status >= 0 else 128 - status

    def _mount(self, volume: dict[str, Any]) -> "subprocess.Popen[str]":
        for options in ([], ["--no-fuse"]):
            command = [sys.executable, "-m", "bucket_grpo.emulator", "mount", volume["source"], volume["path"]]
            command += [*self.inside.mount_options, *(["--read-only"] if volume["read_only"] else []), *options]
            process = subprocess.Popen(
                command, env=self.inside.mount_env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/"
            )
            timer = time.monotonic() + MOUNT_TIMEOUT_S
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("mounted ") or time.monotonic() > timer:
                    return process
            if process.wait() != NO_FUSE:
                break
            print("FUSE can't be had here: the volume is a plain folder with the same delays", flush=True)
        raise CannotStart(f"volume {volume['source']} could not be mounted at {volume['path']} (see the job's log)")

    def _start_command(self) -> "subprocess.Popen[bytes]":
        path = self.inside.env["PATH"]
        if shutil.which(self.inside.command[0], path=path) is None:
            raise CannotStart(f"command {self.inside.command[0]!r} is not in the image")
        return subprocess.Popen(
            self.inside.command,
            env=self.inside.env,
            stdin=subprocess.DEVNULL,
            cwd=self.inside.env.get("HOME", "/"),
            start_new_session=True,
        )

    def _wait(self) -> int:
        """The command's exit status; meanwhile, collect the orphans that land here."""
        assert self.command is not None
        deadline: float | None = None
        while True:
            if self.asked_to_stop and deadline is None:
                deadline = time.monotonic() + self.inside.stop_grace_s
            if deadline is not None and time.monotonic() > deadline:
                self.command.kill()
            status = self.command.poll()
            if status is not None:
                return status
            self._collect_orphans()
            time.sleep(0.02)

    def _collect_orphans(self) -> None:
        ours = {process.pid for process in (self.command, *self.mounts) if process is not None}
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_pid not in ours:
                os.waitpid(found.si_pid, os.WNOHANG)
        except ChildProcessError:
            return

    def _end_mounts(self) -> None:
        """A mount flushes when it is asked to stop; with a grace of 0 what was not flushed is lost, as on the Hub."""
        for process in self.mounts:
            process.terminate() if self.inside.flush_grace_s else process.kill()
        deadline = time.monotonic() + self.inside.flush_grace_s
        for process in self.mounts:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _on_sigterm(self, _signum: int, _frame: object) -> None:
        self.asked_to_stop = True
        if self.command is not None:
            self.command.terminate()

    def _say(self, text: str) -> None:
        os.write(self.status, (text + "\n").encode())


def read_inside() -> Inside:
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)  # the Hub is gone
    return Inside(**json.loads(line))


def run_in_namespaces(status: int) -> int:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    unshare_all()
    os.write(status, b"unshared\n")
    inside = read_inside()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        # Process 1 of the job: the kernel ends everything in the namespace with it, and with it ends all of the job.
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            folder = Path(inside.folder)
            keep = [Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parent.parent]
            build_root(folder / "root", folder / "tmp", keep, [v["path"] for v in inside.volumes])
            os.chroot(folder / "root")
            os.chdir("/")
            set_up_network(inside.address or "")
            code = Job(inside, status).run()
        except (CannotStart, OSError) as error:
            os.write(status, f"failed: {error}\n".encode())
            code = 1
        sys.stdout.flush()
        os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        try:
            _, result = os.waitpid(child, 0)
        except InterruptedError:
            continue
        code = os.waitstatus_to_exitcode(result)
        return code if code >= 0 else 128 - code


def run_plain(status: int) -> int:
    from bucket_grpo.runtime.guard import end_descendants

    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.write(status, b"unshared\n")
    inside = read_inside()
    for volume in inside.volumes:
        Path(volume["path"]).mkdir(parents=True, exist_ok=True)
    code = Job(inside, status).run()
    end_descendants()
    return code


def main() -> int:
    status, mode = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(status, False)
    try:
        return run_plain(status) if mode == "plain" else run_in_namespaces(status)
    except CannotStart as error:
        os.write(status, f"failed: {error}\n".encode())
        return 1


if __name__ == "__main__":
    sys.exit(main())
