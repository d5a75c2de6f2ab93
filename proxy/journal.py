"""What really answered: one JSON line per completion, written behind the requests by a thread.

The loop only appends to a list; hashing, encoding and writing happen in the thread, every `FLUSH_S` and in small
portions, since it shares the interpreter with the loop. A kill loses at most what was answered since the last flush.
"""

import contextlib
import hashlib
import logging
import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import orjson

from bucket_grpo.proxy.completion import ids_sha256

FLUSH_S = 0.1
MAX_PENDING = 50_000
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """One completion; `served` is the name under which vLLM answered, `number` its version (None: the base)."""

    id: str
    requested: str
    served: str
    number: int | None
    replica: str | None
    route: str
    retries: int
    late: bool
    status: int
    prompt_sha256: str
    latency_s: float
    prompt: list[int] | None = None
    output: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    reason: str | None = None
    t: float = 0.0
    sampled: bool = False


class Journal:
    """Append-only `journal-<pid>-<utc>.jsonl` in `folder`.

    Every line has the fields of `Record`, without the token ids themselves but with `output_sha256` (see
    `ids_sha256`); a random `sample_frac` of the lines also holds `sample: {prompt, output, logprobs}`.
    """

    def __init__(self, folder: Path, sample_frac: float, seed: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"journal-{os.getpid()}-{datetime.now(UTC):%Y%m%dt%H%M%S%fz}.jsonl"
        self.written = self.dropped = 0
        self.error: str | None = None
        self._sample_frac = sample_frac
        self._random = random.Random(seed)
        self._pending: deque[Record] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._file: IO[bytes] = self.path.open("ab")
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Queue a record; never blocks. Beyond `MAX_PENDING` unwritten ones it is counted in `dropped` instead."""
        if len(self._pending) >= MAX_PENDING:
            self.dropped += 1
            return
        record.t = time.time()
        record.sampled = self._random.random() < self._sample_frac
        if not record.sampled:
            record.prompt = record.logprobs = None
        self._pending.append(record)

    def close(self) -> None:
        """Write what is pending, then close the file."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout=30)
        self._file.close()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(FLUSH_S)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        lines: list[bytes] = []
        with contextlib.suppress(IndexError):
            while len(lines) < MAX_PENDING:
                lines.append(orjson.dumps(_line(self._pending.popleft()), option=orjson.OPT_APPEND_NEWLINE))
        if not lines:
            return
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
            self.written += len(lines)
            self.error = None
        except OSError as error:
            self.dropped += len(lines)
            if self.error is None:
                log.error("the journal can't be written to %s: %s; completions go on unrecorded", self.path, error)
            self.error = f"{self.path}: {error}"


def _line(record: Record) -> dict[str, object]:
    line: dict[str, object] = {
        "id": record.id,
        "t": record.t,
        "requested": record.requested,
        "served": record.served,
        "number": record.number,
        "replica": record.replica,
        "route": record.route,
        "retries": record.retries,
        "late": record.late,
        "status": record.status,
        "prompt_sha256": record.prompt_sha256,
        "output_sha256": _digest(record.output),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "latency_s": round(record.latency_s, 6),
        "finish_reason": record.finish_reason,
    }
    if record.reason is not None:
        line["reason"] = record.reason
    if record.sampled and record.prompt is not None and record.output is not None:
        line["sample"] = {"prompt": record.prompt, "output": record.output, "logprobs": record.logprobs}
    return line


def _digest(ids: list[int] | None) -> str | None:
    if ids is None:
        return None
    try:
        return ids_sha256(ids)
    except (OverflowError, TypeError):
        return hashlib.sha256(orjson.dumps(ids)).hexdigest()
