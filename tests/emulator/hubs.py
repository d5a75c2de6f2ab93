"""An emulated Hub as a process of its own, for the tests of everything that talks to a Hub."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass
class RunningHub:
    """A served Hub: where it is, and the tokens of its users by `(user, role)`."""

    endpoint: str
    root: Path
    process: subprocess.Popen[str]
    tokens: dict[tuple[str, str], str]
    admin: str

    @property
    def token(self) -> str:
        return self.tokens["me", "write"]

    @property
    def read_token(self) -> str:
        return self.tokens["me", "read"]

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """The environment of a client process: this Hub, its token, and caches of its own under `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
        return kept | {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": token or self.token,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }

    def create_bucket(self, bucket: str, private: bool = True) -> str:
        """Create a bucket of the user "me"; its id."""
        answer = httpx.post(f"{self.endpoint}/api/buckets/{bucket}", json={"private": private}, headers=self._bearer())
        answer.raise_for_status()
        return bucket

    def paths(self, bucket: str) -> list[str]:
        """The paths of all files of a bucket, in their order."""
        answer = httpx.get(f"{self.endpoint}/api/buckets/{bucket}/tree?limit=10000", headers=self._bearer())
        answer.raise_for_status()
        return [entry["path"] for entry in answer.json()]

    def _bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def add_fault(self, **fault: Any) -> None:
        """Put a fault in force; its fields are those of `bucket_grpo.emulator.hub_faults.Fault`."""
        self._control("POST", "faults", fault)

    def clear_faults(self) -> None:
        self._control("DELETE", "faults")

    def faults(self) -> list[dict[str, Any]]:
        """The faults in force, each with the number of requests that it hit."""
        found: list[dict[str, Any]] = self._control("GET", "faults")
        return found

    def collect_garbage(self, older_than_s: float = 0) -> int:
        removed: int = self._control("DELETE", f"garbage?older_than_s={older_than_s}")["xorbs_removed"]
        return removed

    def kill(self) -> None:
        """End the server as a power cut would: no goodbye to anybody."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if self.process.stdout:
            self.process.stdout.close()

    def _control(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self.admin}"}
        url = f"{self.endpoint}/_emulator/{path}"
        answer = httpx.request(method, url, headers=headers, content=json.dumps(body) if body else None, timeout=30)
        answer.raise_for_status()
        return answer.json()


def start_hub(root: Path, *arguments: str, port: int = 0) -> RunningHub:
    """Start a server on `root` (new, or one that an earlier server left) and wait until it answers."""
    command = [
        sys.executable,
        "-m",
        "bucket_grpo.emulator",
        "serve",
        "--root",
        str(root),
        "--port",
        str(port),
        *arguments,
    ]
    log = root.with_name(f"{root.name}.log").open("a")
    with log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        word, _, url = line.strip().partition(" ")
        if word == "serving":
            break
    else:
        raise RuntimeError(f"the emulated Hub did not start: {Path(log.name).read_text()}")
    file = json.loads((root / "tokens.json").read_text())
    tokens = {(user["name"], role): token for user in file["users"] for role, token in user["tokens"].items()}
    return RunningHub(url, root, process, tokens, file["admin"])


@contextmanager
def running_hub(folder: Path, *arguments: str, users: Sequence[str] = ("me",)) -> Iterator[RunningHub]:
    """A Hub under `folder/hub` for as long as the block lasts. `arguments` go to `serve`."""
    wanted = [option for user in users for option in ("--user", user)]
    hub = start_hub(folder / "hub", *wanted, *arguments)
    try:
        yield hub
    finally:
        hub.stop()
