"""From the bucket to a folder on local disk that vLLM can load: read, check every byte, unpack. Runs in threads."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bucket_grpo.bucket_sync.stores import NotFound, Store, StoreError
from bucket_grpo.bucket_sync.version_file import Canary, VersionRejected, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef

# A version is announced once its writer confirmed it, but a mount may go on hiding a name that it once found missing
# for 30 s, and may show an older, shorter content for as long.
RETRY_FOR_S = 45.0
NOT_YET_THERE = frozenset({"wrong_size", "wrong_hash"})


@dataclass(frozen=True)
class Staged:
    folder: Path
    canary: Canary | None
    retries: int


def stage(
    store: Store, ref: VersionRef, base_model: str, staging_dir: Path, retry_for_s: float = RETRY_FOR_S
) -> Staged:
    """Unpack `ref` below `staging_dir`; blocks for as long as the store does.

    Raises:
        VersionRejected: the bucket holds something that must not be served, and goes on doing so.
        StoreError: it could not be read for `retry_for_s` seconds.
    """
    deadline = time.monotonic() + retry_for_s
    pause, retries = 0.1, 0
    while True:
        try:
            version = verify_version(store.read(ref.key), expect=ref, base_model=base_model)
            break
        except (StoreError, VersionRejected) as error:
            passes = isinstance(error, StoreError) or error.reason in NOT_YET_THERE
            if not passes or time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause, retries = min(2 * pause, 2.0 if isinstance(error, NotFound) else 5.0), retries + 1
    folder = staging_dir / ref.name
    if folder.exists():  # left by an agent that died; a folder appears complete or not at all, but its owner is gone
        shutil.rmtree(folder)
    return Staged(version.write_peft_folder(folder), version.canary, retries)
