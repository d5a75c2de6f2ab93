"""Following a file of JSON lines that another process is writing."""

import json
import os
from pathlib import Path
from typing import Any


class Follower:
    """Reads the whole lines that were added since the last look; a line that is still being written waits.

    When another file takes its place (a resumed run writes its metrics anew), that one is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The objects added since the last call; none while the file is not there."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file_id:
                    self._file_id, self._offset = (status.st_dev, status.st_ino), 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
