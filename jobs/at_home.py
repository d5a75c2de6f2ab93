"""The same launch on this machine: an emulated Hub for as long as it takes, and everything else as on the real one."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bucket_grpo.jobs.launch import LaunchFailed
from bucket_grpo.runtime.processes import Child, spawn

USER = "me"
START_TIMEOUT_S = 30.0
STOP_GRACE_S = 30.0


@contextmanager
def emulated_hub(
    root: Path, *, profile: str, time_scale: float = 1.0, say: Callable[[str], None] = print
) -> Iterator[str]:
    """Serve a Hub from `root`, and make this process a client of it; yields its URL.

    Call it before `huggingface_hub` is imported: that reads `HF_ENDPOINT` once. Raises `LaunchFailed` if the Hub does
    not start. On leaving the block, the Hub ends, and with it every job.
    """
    if "huggingface_hub" in sys.modules:
        raise RuntimeError("huggingface_hub was imported already: it would go on talking to the real Hub")
    command = [sys.executable, "-m", "bucket_grpo.emulator", "serve", "--root", str(root), "--user", USER]
    hub = spawn(
        [*command, "--profile", profile, "--time-scale", str(time_scale)],
        name="hub",
        log_path=root.parent / "hub.log",
        env=dict(os.environ),
    )
    try:
        url = _wait_for(hub, say)
        token = json.loads((root / "tokens.json").read_text())["users"][0]["tokens"]["write"]
        os.environ |= {
            "HF_ENDPOINT": url,
            "HF_TOKEN": token,
            "HF_HOME": str(root.parent / "hf-home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        yield url
    finally:
        hub.stop(STOP_GRACE_S)


def _wait_for(hub: Child, say: Callable[[str], None]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and hub.poll() is None:
        lines = hub.tail(10).splitlines()
        for line in lines:
            if line.startswith("serving http"):
                for note in lines:
                    if note.startswith("jobs run as plain"):
                        say(note)
                return line.removeprefix("serving ")
        time.sleep(0.05)
    raise LaunchFailed(f"the emulated Hub did not start: {hub.tail(3) or 'it left no log'} (log: {hub.log_path})")


def keep_logs(root: Path, logs: Path) -> None:
    """Of a Hub that has ended, keep each job's log, named by its part, and remove the rest."""
    logs.mkdir(exist_ok=True)
    for folder in sorted((root / "jobs").iterdir()):
        labels = json.loads((folder / "job.json").read_text())["spec"]["labels"]
        if (folder / "log.txt").exists():
            with (logs / f"job-{labels.get('part', folder.name)}.log").open("ab") as log:
                log.write((folder / "log.txt").read_bytes())
    for path in (root, root.parent / "hf-home"):
        shutil.rmtree(path, ignore_errors=True)
