"""The agent's whole state in one place: what its parts write, and what `GET /agent/status` reads.

Single-threaded (the event loop's); `seq` grows with every change that a reader must learn of at once, which excludes
load figures. Readers wait for a change instead of polling.
"""

import asyncio
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bucket_grpo.bucket_sync.version_file import Canary
from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState
from bucket_grpo.bucket_sync.wire import AgentStatus, EngineState, Load, VersionStatus, Wanted
from bucket_grpo.inference.lifecycle import Held, after_engine_loss, check_move

KEEP_UNLOADED = 32
SERVING = frozenset({VersionState.READY, VersionState.RETIRING})


@dataclass
class Version:
    """One version on this replica. `strikes` counts engine deaths while it was being loaded or proved."""

    ref: VersionRef
    state: VersionState = VersionState.WANTED
    reason: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    canary: Canary | None = None
    strikes: int = 0


@dataclass
class Counters:
    loads: int = 0
    load_retries: int = 0
    load_failures: int = 0
    engine_restarts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class Board:
    def __init__(self, replica: str, base_model: str, dtype: str) -> None:
        self.replica = replica
        self.base_model = base_model
        self.dtype = dtype
        self.boot_id = secrets.token_hex(8)
        self.seq = int(time.time() * 1000)  # so that it grows over a restart of the agent, too
        self.engine: EngineState = "starting"
        self.engine_reason: str | None = None
        self.engine_epoch = 0
        self.max_model_len: int | None = None
        self.wanted: dict[str, VersionRef] = {}
        self.versions: dict[str, Version] = {}
        self.in_flight: Counter[str] = Counter()
        self.load = Load()
        self.counters = Counters()
        self._changed = asyncio.Event()

    # What readers do

    def status(self) -> AgentStatus:
        return AgentStatus(
            seq=self.seq,
            replica=self.replica,
            boot_id=self.boot_id,
            engine_epoch=self.engine_epoch,
            engine=self.engine,
            reason=self.engine_reason,
            base_model=self.base_model,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            versions={
                name: VersionStatus(state=version.state, reason=version.reason, seconds=dict(version.seconds))
                for name, version in self.versions.items()
            },
            load=self.load,
            loads=self.counters.loads,
            load_retries=self.counters.load_retries,
            load_failures=self.counters.load_failures,
            engine_restarts=self.counters.engine_restarts,
            rejected=dict(self.counters.rejected),
        )

    async def wait_beyond(self, seq: int, timeout_s: float) -> None:
        """Return when `seq` was passed, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.seq <= seq:
                    await self._changed.wait()
        except TimeoutError:
            return

    def serves(self, model: str) -> bool:
        version = self.versions.get(model)
        return model == self.base_model or (version is not None and version.state in SERVING)

    def held(self) -> dict[str, Held]:
        return {name: Held(version.ref, version.state, self.in_flight[name]) for name, version in self.versions.items()}

    # What parts of the agent do

    def bump(self) -> None:
        self.seq += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def want(self, wanted: Wanted) -> None:
        """Replace the wish as a whole."""
        wish = {ref.name: ref for ref in wanted.versions}
        if wish != self.wanted:
            self.wanted = wish
            self.bump()

    def add(self, ref: VersionRef) -> None:
        self.versions.pop(ref.name, None)
        self.versions[ref.name] = Version(ref)
        self.bump()

    def move(self, name: str, state: VersionState, reason: str | None = None) -> None:
        """Raises `IllegalMove` for a move that no version may make."""
        version = self.versions[name]
        check_move(name, version.state, state)
        version.state, version.reason = state, reason
        if state is VersionState.UNLOADED:
            self._forget_old()
        self.bump()

    def set_engine(self, engine: EngineState, reason: str | None = None) -> None:
        if (engine, reason) != (self.engine, self.engine_reason):
            self.engine, self.engine_reason = engine, reason
            self.bump()

    def engine_lost(self) -> None:
        """Nothing is loaded any more."""
        self.load = Load()
        for name, version in self.versions.items():
            state = after_engine_loss(version.state)
            if state is not version.state:
                self.move(name, state, "the engine was restarted")

    def request_started(self, model: str) -> None:
        self.in_flight[model] += 1

    def request_ended(self, model: str) -> None:
        self.in_flight[model] -= 1
        if self.in_flight[model] == 0:
            del self.in_flight[model]
            version = self.versions.get(model)
            if version is not None and version.state is VersionState.RETIRING:
                self.bump()  # it can be unloaded now

    def _forget_old(self) -> None:
        unloaded = [name for name, version in self.versions.items() if version.state is VersionState.UNLOADED]
        for name in unloaded[:-KEEP_UNLOADED]:
            del self.versions[name]
