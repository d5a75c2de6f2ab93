"""From the bucket to a PEFT folder on local disk: the only way in which a replica comes by a version.

vLLM reads the folder at load and again whenever it evicted the adapter, in its engine loop: so it must be local, stay,
and be right. A version appears there only after every byte was checked.

Call `stage` only for versions that their publisher has confirmed (the proxy's hint, the Hub's `/events`): on a mount, a
probe that comes too early makes the name missing for up to 30 s.
"""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bucket_grpo.bucket_sync.arrivals import Arrivals
from bucket_grpo.bucket_sync.deadline import with_deadline
from bucket_grpo.bucket_sync.safetensors_file import TensorInfo
from bucket_grpo.bucket_sync.store_contract import NotFound, Store, StoreError
from bucket_grpo.bucket_sync.version_file import Canary, VerifiedVersion, VersionRejected, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef

# What a stale cache or a commit under way looks like; anything else that is wrong stays wrong.
MAY_PASS = frozenset({"wrong_size", "wrong_hash"})
PAUSE_S = (0.1, 2.0)


@dataclass(frozen=True)
class StagedVersion:
    """A verified version as a folder that vLLM and PEFT load. `source` is the store that it came from."""

    ref: VersionRef
    folder: Path
    base_model: str
    adapter_config: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    canary: Canary | None
    source: str
    retries: int


@dataclass
class StagerCounts:
    staged: int = 0
    retries: int = 0
    fallbacks: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class Stager:
    """Args:
    store: where versions are read first, usually a read-only mount.
    fallback: read where `store` fails for good (EIO, a stale handle, a hang) or does not show the version in time.
    staging_dir: on local disk; one folder per version, named as vLLM serves it.
    base_model: the base that this replica serves.
    read_s: limit for one read, beside a second per 10 MB.
    patience_s: how long a confirmed version may stay hidden in `store` before `fallback` is asked.
    arrivals: the bucket's feed, if there is one: it ends a wait for a version that was not visible yet.
    avoid_s: how long `store` is left alone after it failed, so that a dead mount costs one hanging read, not many.
    """

    def __init__(
        self,
        store: Store,
        fallback: Store | None,
        staging_dir: Path,
        base_model: str,
        *,
        read_s: float = 20.0,
        patience_s: float = 10.0,
        avoid_s: float = 60.0,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.counts = StagerCounts()
        self._store, self._fallback = store, fallback
        self._staging_dir = staging_dir
        self._base_model = base_model
        self._read_s, self._patience_s, self._avoid_s = read_s, patience_s, avoid_s
        self._avoid_until = 0.0
        self._arrivals = arrivals
        self._lock = threading.Lock()

    def folder(self, ref: VersionRef) -> Path:
        return self._staging_dir / ref.name

    def stage(self, ref: VersionRef, deadline_s: float = 60.0) -> StagedVersion:
        """Read, verify and unpack a confirmed version.

        Raises:
            VersionRejected: the bucket holds something that must not be served.
            StoreError: it could not be read, or not be written to `staging_dir`, within `deadline_s` seconds.
        """
        started = time.monotonic()
        pause_s, retries = PAUSE_S[0], 0
        while True:
            store = self._choose(waited_s=time.monotonic() - started)
            try:
                verified = self._read(store, ref)
                break
            except VersionRejected as rejection:
                if rejection.reason not in MAY_PASS:
                    self._count(rejected=rejection.reason)
                    raise
                problem: Exception = rejection
            except NotFound as error:
                problem = error
            except StoreError as error:
                problem = error
                if store is self._store and self._fallback is not None:
                    self._avoid_until = time.monotonic() + self._avoid_s
            if time.monotonic() - started + pause_s > deadline_s:
                if isinstance(problem, VersionRejected):
                    self._count(rejected=problem.reason)
                    raise problem
                raise StoreError(f"{ref.key} could not be read for {deadline_s:.0f} s ({retries + 1} reads): {problem}")
            self._pause(ref, pause_s)
            pause_s, retries = min(2 * pause_s, PAUSE_S[1]), retries + 1
            self._count(retries=1)
        self._count(staged=1, fallbacks=int(store is self._fallback))
        return self._unpack(verified, source=repr(store), retries=retries)

    def evict(self, ref: VersionRef) -> None:
        """Delete a folder, once vLLM has unloaded it: an evicted adapter whose files are gone kills vLLM."""
        if self.folder(ref).exists():
            shutil.rmtree(self.folder(ref))

    def keep_only(self, refs: list[VersionRef]) -> None:
        """Delete every folder but those of `refs`: what an agent that died left behind."""
        kept = {ref.name for ref in refs}
        for path in self._staging_dir.iterdir() if self._staging_dir.exists() else ():
            if path.name not in kept:
                shutil.rmtree(path)

    def _pause(self, ref: VersionRef, pause_s: float) -> None:
        if self._arrivals is None:
            time.sleep(pause_s)
        else:
            self._arrivals.wait(ref.key, pause_s)

    def _choose(self, waited_s: float) -> Store:
        if self._fallback is None:
            return self._store
        broken = time.monotonic() < self._avoid_until
        return self._fallback if broken or waited_s >= self._patience_s else self._store

    def _read(self, store: Store, ref: VersionRef) -> VerifiedVersion:
        limit_s = self._read_s + ref.size / 10e6
        try:
            data = with_deadline(lambda: store.read(ref.key), limit_s)
        except TimeoutError as error:
            raise StoreError(f"{store!r}: reading {ref.key} hangs: {error}") from error
        return verify_version(data, expect=ref, base_model=self._base_model)

    def _unpack(self, verified: VerifiedVersion, source: str, retries: int) -> StagedVersion:
        ref, folder = verified.ref, self.folder(verified.ref)
        try:
            self.evict(ref)  # left by an agent that died; nothing of this one's vLLM can have it
            verified.write_peft_folder(folder)
        except OSError as error:
            raise StoreError(f"{ref.key} cannot be staged in {folder}: {error.strerror or error}") from error
        return StagedVersion(
            ref=ref,
            folder=folder,
            base_model=verified.base_model,
            adapter_config=verified.adapter_config,
            tensors=verified.tensors,
            canary=verified.canary,
            source=source,
            retries=retries,
        )

    def _count(self, *, staged: int = 0, retries: int = 0, fallbacks: int = 0, rejected: str | None = None) -> None:
        with self._lock:
            self.counts.staged += staged
            self.counts.retries += retries
            self.counts.fallbacks += fallbacks
            if rejected is not None:
                self.counts.rejected[rejected] += 1
