"""An emulated Hub with jobs, for tests: the released client against it, and what runs on this machine because of it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, JobInfo, Volume

from tests.emulator.hubs import RunningHub, running_hub

NAMESPACES = os.geteuid() == 0


@dataclass
class Cluster:
    """A running Hub and a client with a write token of its user `me`."""

    hub: RunningHub
    namespaces: bool

    def __post_init__(self) -> None:
        self.api = HfApi(endpoint=self.hub.endpoint, token=self.hub.token)

    def run(self, script: str, **more: Any) -> JobInfo:
        arguments = {"image": "any", "command": ["bash", "-c", script], "timeout": 30, "namespace": "me"} | more
        return self.api.run_job(**arguments)

    def inspect(self, job: JobInfo) -> JobInfo:
        return self.api.inspect_job(job_id=job.id, namespace="me")

    def wait(self, job: JobInfo, *stages: str, timeout: float = 20) -> JobInfo:
        """Until the job is in one of `stages`, or over."""
        return self.api.wait_for_job(
            job_id=job.id, namespace="me", timeout=timeout, poll_interval=0.1, stages=list(stages) or None
        )

    def log(self, job: JobInfo) -> list[str]:
        return list(self.api.fetch_job_logs(job_id=job.id, namespace="me"))

    def volume(self, bucket: str, *, read_only: bool) -> Volume:
        self.api.create_bucket(f"me/{bucket}", exist_ok=True)
        return Volume(type="bucket", source=f"me/{bucket}", mount_path="/lora", read_only=read_only)

    def faults(self, **faults: Any) -> None:
        self._admin("job-faults", faults)

    def lose(self, job: JobInfo, *, forget: bool = False) -> None:
        self._admin(f"jobs/{job.id}/lose?forget={int(forget)}", {})

    def _admin(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self.hub.admin}"}
        httpx.post(f"{self.hub.endpoint}/_emulator/{path}", json=body, headers=headers, timeout=10).raise_for_status()

    def get(self, job: JobInfo, token: str | None = None, path: str = "/") -> httpx.Response:
        """Ask the job's exposed port, once something listens there."""
        urls = self.wait(job, "RUNNING").status.expose_urls
        assert urls
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for _ in range(100):
            answer = httpx.get(urls[0] + path, headers=headers, timeout=20)
            if answer.status_code != 502:
                return answer
            time.sleep(0.1)
        return answer


@contextmanager
def cluster(folder: Path, *arguments: str, namespaces: bool = NAMESPACES) -> Iterator[Cluster]:
    options = ["--profile", "local", "--schedule-s", "0.05", *([] if namespaces else ["--no-namespaces"]), *arguments]
    with running_hub(folder, *options, users=["me", "other"]) as hub:
        yield Cluster(hub, namespaces)


def running_with(mark: str) -> list[int]:
    """Processes of this machine whose command line holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if mark.encode() in words:
                found.append(int(entry.name))
    return found


def eventually(true: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return true()
