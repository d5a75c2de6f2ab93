"""Checkpoints go up behind the training loop: `submit` takes a snapshot by hard links and returns.

Give it a store of its own (a second mount, or `HubStore`): a mount has one flush loop, and a checkpoint in it would
delay every version behind it.
"""

import logging
import os
import shutil
import threading
from pathlib import Path

from bucket_grpo.bucket_sync.checkpoints import prune_checkpoints, save_checkpoint
from bucket_grpo.bucket_sync.current import Superseded
from bucket_grpo.bucket_sync.store_contract import Store

log = logging.getLogger(__name__)


class CheckpointFailed(Exception):
    """An earlier checkpoint did not reach the bucket; the cause is chained."""


class CheckpointUploader:
    """Args:
    spool: a folder on the disk on which checkpoints are saved; snapshots wait there.
    keep: how many checkpoints stay in the bucket.
    """

    def __init__(self, store: Store, run: str, incarnation: str, spool: Path, *, keep: int = 3) -> None:
        self._store, self._run, self._incarnation = store, run, incarnation
        self._spool, self._keep = spool, keep
        self._waiting: tuple[int, Path] | None = None
        self._closing = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self.uploaded: list[int] = []
        self.skipped = 0
        self._thread = threading.Thread(target=self._loop, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, folder: Path, step: int) -> None:
        """Snapshot `folder` and upload it in the background; one that still waits for its turn is skipped.

        Raises `CheckpointFailed` (or `Superseded`) once for an earlier checkpoint that did not get there.
        """
        self._raise_failure()
        snapshot = self._spool / f"step-{step:06d}"
        shutil.rmtree(snapshot, ignore_errors=True)  # left by a crash
        # Links, not copies: the trainer's own rotation only removes names, and a checkpoint is never written in place.
        shutil.copytree(folder, snapshot, copy_function=_link_or_copy)
        with self._changed:
            overtaken, self._waiting = self._waiting, (step, snapshot)
            self.skipped += overtaken is not None
            self._changed.notify_all()
        if overtaken is not None:
            shutil.rmtree(overtaken[1])

    def close(self, timeout: float) -> None:
        """Upload what waits, then end; raises as `submit`, `TimeoutError` if that takes more than `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        self._raise_failure()
        if self._thread.is_alive():
            raise TimeoutError(f"a checkpoint of {self._run} was still being uploaded after {timeout:.0f} s")

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                (step, snapshot), self._waiting = self._waiting, None
            try:
                save_checkpoint(self._store, snapshot, run=self._run, incarnation=self._incarnation, step=step)
                self.uploaded.append(step)
                prune_checkpoints(self._store, self._run, self._incarnation, self._keep)
            except Exception as error:  # noqa: BLE001 - kept, and raised in the trainer's thread at its next call
                log.error("checkpoint of step %d did not reach the bucket: %s", step, error)
                self._failure = error
            finally:
                shutil.rmtree(snapshot, ignore_errors=True)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if isinstance(failure, Superseded):
            raise Superseded(str(failure)) from failure
        if failure is not None:
            raise CheckpointFailed(f"a checkpoint did not reach the bucket: {failure}") from failure


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem
        shutil.copy2(source, target)
