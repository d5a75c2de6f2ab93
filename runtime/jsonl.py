"""Following a file of JSON lines that another process is writing."""

import json
from pathlib import Path
from typing import Any


class Follower:
    """Reads the whole lines that were added since the last look; a line that is still being written waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The objects added since the last call; none while the file is not there."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines() if line.strip()]
