"""What a run must not leave behind: processes that it started, and mounts."""

import time
from pathlib import Path


def processes_mentioning(text: str) -> list[str]:
    """Command lines of live processes in which `text` (such as a run's folder) appears."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            continue
        if text in command and not zombie and "pytest" not in command:
            found.append(f"{entry.name}: {command}")
    return found


def mounts_under(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {path}/" in line]


def assert_nothing_left(run_dir: Path, within_s: float = 20.0) -> None:
    """vLLM's processes do not name the run's folder, but the staging folder and the agent's config do."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not processes_mentioning(str(run_dir)) and not mounts_under(run_dir):
            return
        time.sleep(0.2)
    assert processes_mentioning(str(run_dir)) == []
    assert mounts_under(run_dir) == []
