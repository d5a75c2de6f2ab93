"""Starts `python -m bucket_grpo.emulator mount` for tests, and waits for it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "bucket_grpo.emulator", "mount"]
START_TIMEOUT_S = 60.0

needs_fuse = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse here")


@dataclass
class MountProcess:
    path: Path
    process: subprocess.Popen
    errors: list[str] = field(default_factory=list)

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@dataclass
class Mounts:
    """Mounts of one folder of objects, all ended by `close`."""

    tmp_path: Path
    running: list[MountProcess] = field(default_factory=list)

    @property
    def objects(self) -> Path:
        return self.tmp_path / "objects"

    def mount(self, name: str, *flags: str, time_scale: float = 0.1, source: str | None = None) -> MountProcess:
        path = self.tmp_path / name
        command = [*COMMAND, source or str(self.objects), str(path), "--time-scale", str(time_scale), *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        mounted = MountProcess(path, process)
        assert process.stdout
        reader = threading.Thread(target=lambda: mounted.errors.extend(process.stderr), daemon=True)
        reader.start()
        line = process.stdout.readline()
        if line != f"mounted {path}\n":
            process.wait(10)
            reader.join(5)
            raise AssertionError(f"mount said {line!r} and ended with {process.returncode}: {''.join(mounted.errors)}")
        self.running.append(mounted)
        return mounted

    def close(self) -> None:
        for mounted in self.running:
            if mounted.process.poll() is None:
                mounted.kill()
            subprocess.run(["fusermount3", "-uzq", mounted.path], check=False)


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Seconds until `condition` held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "did not happen in time"
        time.sleep(0.01)
    return time.monotonic() - start
