"""Why vLLM died, from its log and exit status. Pure but for reading the file."""

import re
import signal
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES = 512 * 1024
# "(EngineCore pid=12) ERROR 11-30 15:48:52 [core.py:129] " and the like, before what was said.
_PREFIX = re.compile(
    r"^(\([^)]*pid=\d+\)\s*)?((ERROR|CRITICAL|WARNING|INFO)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s*)?"
)
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(Error|Exception|Interrupt|Failure))(: (?P<text>.*))?$")
# What Python says on its way out.
_NOISE = re.compile(r"nanobind|leaked|remainder|warnings\.warn|refleaks")
_USAGE_ERROR = re.compile(r"^\S+\.py: error: (?P<text>.+)$")
# What vLLM's other processes say about a death that happened elsewhere.
_ECHOES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "Engine core proc",
    "resource_tracker",
    "CancelledError",
    "KeyboardInterrupt",
    "WorkerProc initialization failed",
    "Executor failed",
    "cancelled",
)
_ENGINE_GONE = ("engine core exited unexpectedly", "EngineCore encountered an issue")
# Another start would end in the same way.
_PERMANENT = (
    "unrecognized arguments",
    "invalid choice",
    "invalid literal",
    "Repo id must",
    "is not a valid model identifier",
    "is not a local folder",
    "No such file or directory",
    "does not appear to have a file named",
    "Can't load the configuration",
    "Invalid repository ID or local directory",
    "is greater than the derived max_model_len",
    "validation error for",
    "No module named",
    "RepositoryNotFoundError",
    "GatedRepoError",
    "not supported for now",
)


@dataclass(frozen=True)
class Cause:
    """One line for people. `permanent`: starting again would not help."""

    text: str
    permanent: bool


def cause_of_death(status: int, log: Path) -> Cause:
    """`status` as a shell gives it (128 + signal for a process that was killed), or as `subprocess` does (-signal)."""
    status = 128 - status if status < 0 else status
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = ""
    said = exception_in(text)
    if said is None and any(sign in text for sign in _ENGINE_GONE):
        return Cause(
            f"vLLM's EngineCore process ended without a word: it was killed (out of memory, or by someone); log: {log}",
            False,
        )
    if said is not None:
        return Cause(f"vLLM ended with status {status}: {said} (log: {log})", any(sign in said for sign in _PERMANENT))
    return Cause(f"vLLM {_how(status)}{_last_line(text)} (log: {log})", False)


def exception_in(text: str) -> str | None:
    """The exception (or usage error) that a vLLM log ends with, skipping those that only echo it."""
    found = None
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    for index, line in enumerate(lines):
        usage = _USAGE_ERROR.match(line)
        if usage:
            return usage["text"]
        match = _EXCEPTION.match(line)
        if match and not any(echo in line for echo in _ECHOES):
            found = _with_details(line, lines[index + 1 : index + 4])
    return found


def _with_details(line: str, following: list[str]) -> str:
    """pydantic puts what matters on the lines after the exception's own, indented."""
    details = []
    for more in following:
        if not more.startswith("  ") or not more.strip():
            break
        details.append(more.strip())
    return " ".join([line.strip(), *details])[:600]


def _how(status: int) -> str:
    if status > 128:
        try:
            name = signal.Signals(status - 128).name
        except ValueError:
            return f"ended with status {status}"
        return f"was killed by {name}" + (" (out of memory, or by someone)" if name == "SIGKILL" else "")
    return f"ended with status {status}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    return f"; its last word: {lines[-1][:300]}" if lines else " without a word"
