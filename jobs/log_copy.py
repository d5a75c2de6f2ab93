"""Copies what is new in log files to our own output, which is the job's log on the Hub."""

import sys
from collections.abc import Iterable
from pathlib import Path


class LogCopy:
    """Follows files by path, from their first byte. `copy` writes the whole lines that came since the last call."""

    def __init__(self) -> None:
        self._offsets: dict[Path, int] = {}

    def copy(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                with open(path, "rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            if whole:
                self._offsets[path] = self._offsets.get(path, 0) + len(whole)
                sys.stdout.write(whole.decode(errors="replace"))
                sys.stdout.flush()
