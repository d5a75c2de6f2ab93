"""What was announced to this proxy, so that a restarted one can tell agents what is wanted.

An append-only file beside the journal; agents only know a version's name, not its digest and size.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from bucket_grpo.bucket_sync.vocabulary import VersionRef

log = logging.getLogger(__name__)


@dataclass
class Announced:
    refs: list[VersionRef] = field(default_factory=list)
    unloaded: set[int] = field(default_factory=set)
    replicas: list[str] | None = None


class VersionLog:
    def __init__(self, folder: Path, incarnation: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"versions-{incarnation}.jsonl"

    def read(self) -> Announced:
        """All that was written; a last line that a kill cut off is left out."""
        announced = Announced()
        if not self.path.exists():
            return announced
        for line in self.path.read_text().splitlines():
            try:
                event = json.loads(line)
                if "accepted" in event:
                    announced.refs.append(VersionRef.model_validate(event["accepted"]))
                elif "unloaded" in event:
                    announced.unloaded.add(event["unloaded"])
                elif "replicas" in event:
                    announced.replicas = event["replicas"]
            except (ValueError, ValidationError) as error:
                if line:
                    log.warning("%s: a line is left out, a kill may have cut it off: %s", self.path, error)
        return announced

    def accepted(self, ref: VersionRef) -> None:
        self._append({"accepted": ref.model_dump()})

    def unloaded(self, number: int) -> None:
        self._append({"unloaded": number})

    def replicas(self, urls: list[str]) -> None:
        self._append({"replicas": urls})

    def _append(self, event: dict[str, object]) -> None:
        # The newline goes first: a line that a kill cut off must not swallow the next one.
        with self.path.open("a") as file:
            file.write("\n" + json.dumps(event))
