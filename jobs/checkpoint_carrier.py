"""Takes the checkpoints that training leaves on local disk to the bucket, and brings the newest back for a resume."""

import sys
import time
from pathlib import Path

from bucket_grpo.bucket_sync.checkpoint_uploader import CheckpointFailed, CheckpointUploader
from bucket_grpo.bucket_sync.checkpoints import restore_checkpoint
from bucket_grpo.bucket_sync.current import Superseded
from bucket_grpo.bucket_sync.store_contract import Store

# The trainer writes `trainer_state.json` near the end of a checkpoint; what comes after takes less than this.
SETTLED_S = 5.0
LAST_FILE = "trainer_state.json"


class CheckpointCarrier:
    """Watches `output_dir` for `checkpoint-<step>` folders that are complete."""

    def __init__(self, store: Store, run: str, incarnation: str, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._uploader = CheckpointUploader(store, run, incarnation, output_dir.parent / "checkpoint-spool")
        self._newest = -1

    def look(self, *, ended: bool = False) -> None:
        """Hand the newest complete checkpoint over, once. `ended`: training is over, nothing is being written."""
        found = max(((step, folder) for step, folder in self._complete(ended)), default=None)
        if found is None or found[0] <= self._newest:
            return
        self._newest = found[0]
        try:
            self._uploader.submit(found[1], found[0])
        except (CheckpointFailed, Superseded) as error:
            print(f"checkpoints: {error}", file=sys.stderr, flush=True)

    def close(self, timeout_s: float = 120.0) -> list[int]:
        """Wait for what is on its way; the steps whose checkpoints are in the bucket."""
        try:
            self._uploader.close(timeout_s)
        except (CheckpointFailed, Superseded, TimeoutError) as error:
            print(f"checkpoints: {error}", file=sys.stderr, flush=True)
        return self._uploader.uploaded

    def _complete(self, ended: bool) -> list[tuple[int, Path]]:
        found = []
        for folder in self._output_dir.glob("checkpoint-*"):
            step = folder.name.removeprefix("checkpoint-")
            if step.isdecimal() and (folder / LAST_FILE).exists() and (ended or _age_s(folder) > SETTLED_S):
                found.append((int(step), folder))
        return found


def _age_s(folder: Path) -> float:
    newest = max((path.stat().st_mtime for path in folder.rglob("*")), default=0.0)
    return time.time() - newest


def bring_back(store: Store, run: str, target: Path) -> Path | None:
    """The newest checkpoint of the run that verifies, on local disk; None if the run never wrote one.

    Raises `CheckpointRejected` if there are some and none verifies.
    """
    restored = restore_checkpoint(store, run, target)
    if restored is None:
        return None
    for key, why in restored.passed_over.items():
        print(f"checkpoint {key} is passed over: {why}", file=sys.stderr, flush=True)
    print(f"going on from step {restored.step} of incarnation {restored.incarnation}", flush=True)
    return restored.folder
