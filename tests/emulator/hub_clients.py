"""The released clients: 1.33 as this environment has it, and 2.4 in a small environment of its own."""

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.hubs import RunningHub

HUB2 = "huggingface_hub==2.4.0"


@dataclass
class ReleasedClient:
    """An interpreter with an unmodified `huggingface_hub`, set up for one Hub by its environment alone."""

    python: Path
    environment: dict[str, str]

    def run(self, code: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python with `api` (an `HfApi`) and `sys` at hand."""
        prelude = "import json, os, sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\napi = HfApi()\n"
        return self._run([str(self.python), "-c", prelude + code, *arguments], check)

    def hf(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the `hf` command."""
        return self._run([str(self.python.with_name("hf")), *arguments], check)

    def start(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        prelude = "import json, os, sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\napi = HfApi()\n"
        command = [str(self.python), "-c", prelude + code, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, text=True, stdout=pipe, stderr=pipe)

    def _run(self, command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, env=self.environment, text=True, capture_output=True, timeout=100)
        if check and done.returncode:
            raise AssertionError(f"{command[-3:]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done


def client_of(version: str, hub: RunningHub, home: Path, token: str | None = None) -> ReleasedClient:
    """The client of major version "1" or "2" for this Hub; `home` holds its caches."""
    python = Path(sys.executable) if version == "1" else hub2_python()
    return ReleasedClient(python, hub.environment(home, token))


def hub2_python() -> Path:
    """An environment with `huggingface_hub` 2.x, made once per user: it can't share one with transformers 5.17."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "bucket-grpo" / HUB2.replace("==", "-")
    python, ready = folder / "bin" / "python", folder / ".ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", HUB2]
            subprocess.run(install, check=True, timeout=300)
            ready.touch()
    return python
