"""A whole run on this machine: one bucket, a mount for each job, vLLM replicas with their agents, and the trainer job.

Every part is the process that a real job would run; only the launcher differs. Whatever ends the run (success, a crash
of any part, Ctrl-C), `LocalRun.stop` leaves no process and no mount behind.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bucket_grpo.bucket_sync.mounted_store import unescaped
from bucket_grpo.cli.errors import UserError
from bucket_grpo.runtime.processes import Child, spawn

NO_FUSE_STATUS = 3
MAX_REPLICA_RESTARTS = 20
# Exit statuses of a replica that would only end the same way again: bad config, port in use, engine gave up.
FINAL_STATUSES = (2, 3, 4)
MIN_FREE_BYTES = 64 * 2**20


class PartFailed(UserError):
    """A part of the run ended, or did not start; the message says which, why, and where its log is."""


@dataclass
class Mount:
    path: Path
    child: Child
    fuse: bool


@dataclass
class Replica:
    """A replica's process, and how to start it again."""

    name: str
    command: list[str]
    child: Child
    restarts: int = 0


@dataclass
class LocalRun:
    """The mounts and replicas of one local run.

    Args:
        run_dir: everything the run leaves: logs, metrics, journal, report, and the bucket's objects.
        profile, time_scale: how the emulated mounts behave; see `bucket-grpo emulator mount --help`.
    """

    run_dir: Path
    profile: str = "local"
    time_scale: float = 1.0
    objects: Path = field(init=False)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    mounts: list[Mount] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_dir = self.run_dir.absolute()
        self.objects = self.run_dir / "bucket"
        self.objects.mkdir(parents=True, exist_ok=True)

    @property
    def env(self) -> dict[str, str]:
        """The environment of the run's jobs: ours with the shared bearer token, and without the user's Hub token."""
        env = {key: value for key, value in os.environ.items() if key not in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
        # TRL's client would send its calls to the proxy through a web proxy, if the environment names one.
        local = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        return {**env, **local, "BUCKET_GRPO_TOKEN": self.token, "TOKENIZERS_PARALLELISM": "false"}

    def check_disk(self) -> None:
        """Refuse a bucket folder that could not even hold the first versions."""
        free = shutil.disk_usage(self.objects).free
        if free < MIN_FREE_BYTES:
            raise PartFailed(
                f"only {free / 2**20:.0f} MiB are free under {self.objects}, at least {MIN_FREE_BYTES / 2**20:.0f} are "
                "needed: free some, or choose another --run-dir"
            )

    def mount(self, name: str, *, read_only: bool) -> Mount:
        """A mount of the bucket for one job; where FUSE can't be had, a plain folder with the same delays."""
        path = self.run_dir / "mounts" / name
        path.mkdir(parents=True, exist_ok=True)
        for fuse in (True, False):
            child = self._start_mount(name, path, read_only=read_only, fuse=fuse)
            self._wait_for_mount(child, path)
            if child.poll() is None:
                mount = Mount(path, child, fuse)
                self.mounts.append(mount)
                return mount
            if child.poll() != NO_FUSE_STATUS:
                break
        raise PartFailed(f"mounting the bucket at {path} failed: {last_line(child)}")

    def _start_mount(self, name: str, path: Path, *, read_only: bool, fuse: bool) -> Child:
        command = [sys.executable, "-m", "bucket_grpo.emulator", "mount", str(self.objects), str(path)]
        command += ["--profile", self.profile, "--time-scale", str(self.time_scale)]
        command += ["--read-only"] if read_only else []
        command += [] if fuse else ["--no-fuse"]
        return spawn(command, name=f"mount-{name}", log_path=self._log(f"mount-{name}"), env=self.env)

    def _wait_for_mount(self, child: Child, path: Path) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if child.poll() is not None or f"mounted {path}" in child.tail(50):
                return
            time.sleep(0.05)
        child.stop()
        raise PartFailed(f"mounting the bucket at {path} took more than 20 s: {last_line(child)}")

    def start(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> Child:
        """Start a part of the run; its log is `logs/<name>.log`. The caller ends it."""
        return spawn(command, name=name, log_path=self._log(name), env={**self.env, **(env or {})})

    def start_replica(self, name: str, command: list[str]) -> None:
        """Start a replica that is started again when it is lost, as a job's platform would."""
        self.replicas.append(Replica(name, command, self.start(name, command)))

    def heal(self) -> list[str]:
        """Start lost replicas again, and say which; `PartFailed` for a part that can't be helped that way."""
        for mount in self.mounts:
            if (status := mount.child.poll()) is not None:
                raise PartFailed(ended(mount.child, status))
        started = []
        for replica in self.replicas:
            status = replica.child.poll()
            if status is None:
                continue
            if status in FINAL_STATUSES or replica.restarts == MAX_REPLICA_RESTARTS:
                raise PartFailed(ended(replica.child, status))
            replica.child.stop(0)  # what is left of its process group
            replica.restarts += 1
            replica.child = self.start(replica.name, replica.command)
            started.append(f"{replica.name} ended with status {status}; started it again")
        return started

    def stop(self, grace_s: float = 15.0) -> None:
        """End the replicas, then the mounts. Safe to call twice, and on a half-started run."""
        for replica in self.replicas:
            replica.child.terminate()
        deadline = time.monotonic() + grace_s
        for replica in self.replicas:
            replica.child.stop(max(0.1, deadline - time.monotonic()))
        for mount in reversed(self.mounts):
            mount.child.terminate()
        for mount in reversed(self.mounts):
            mount.child.stop(5)
            if mount.fuse and is_mounted(mount.path):
                subprocess.run(["fusermount3", "-uz", str(mount.path)], check=False)
            with contextlib.suppress(OSError):
                shutil.rmtree(mount.path) if not mount.fuse else mount.path.rmdir()
        self.replicas.clear()
        self.mounts.clear()

    def _log(self, name: str) -> Path:
        return self.run_dir / "logs" / f"{name}.log"


def ended(child: Child, status: int) -> str:
    return f"{child.name} ended with status {status}: {last_line(child)} (log: {child.log_path})"


def last_line(child: Child) -> str:
    """What the part said last, in its own words if it had any: libraries go on talking while a process ends."""
    lines = [line.strip() for line in child.tail(30).splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(("replica ", "bucket-grpo ", "cannot "))]
    return (own or lines or ["it left no log"])[-1]


def is_mounted(path: Path) -> bool:
    """Read from the kernel's list: looking at a mount whose process is dead raises an error instead."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(unescaped(line.split()[1]) == str(path) for line in lines)
