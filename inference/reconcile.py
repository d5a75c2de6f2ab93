"""The loop that brings what this replica holds to what is wanted: the edge around `lifecycle.decide`.

Staging runs in threads beside it; what touches the engine runs one step at a time. Whatever fails is named in the
version's reason, and whatever an engine's death interrupted is done again by the next life of the engine.
"""

import asyncio
import contextlib
import logging
import time

from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.stores import StoreError
from bucket_grpo.bucket_sync.version_file import VersionRejected
from bucket_grpo.bucket_sync.vocabulary import VersionRef, VersionState
from bucket_grpo.inference.board import Board, Version
from bucket_grpo.inference.canary import FALLBACK_PROMPT, Verdict, tolerance
from bucket_grpo.inference.lifecycle import IN_ENGINE, Do, decide
from bucket_grpo.inference.loading import LoadFailed, check_canary, load, probe
from bucket_grpo.inference.spec import ReplicaSpec
from bucket_grpo.inference.supervisor import Supervisor
from bucket_grpo.inference.threads import in_thread
from bucket_grpo.inference.vllm_client import EngineRefused, EngineUnreachable, VllmClient

S = VersionState
IDLE_S = 0.5
MAX_STRIKES = 2

log = logging.getLogger(__name__)


class Reconciler:
    def __init__(self, spec: ReplicaSpec, board: Board, supervisor: Supervisor, stager: Stager) -> None:
        self._spec = spec
        self._board = board
        self._supervisor = supervisor
        self._stager = stager
        self._staging: dict[str, asyncio.Task[None]] = {}
        self._probed: tuple[int, Verdict] | None = None  # engine epoch, what the probe showed

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                seen = self._board.seq
                if not await self.step():
                    await self._board.wait_beyond(seen, IDLE_S)
        finally:
            for task in self._staging.values():
                task.cancel()

    async def step(self) -> bool:
        """Do what can be done now; whether anything was."""
        self._collect_staging()
        client = self._supervisor.client
        todo = decide(self._board.wanted, self._board.held(), engine_ready=client is not None)
        for do, ref in todo:
            if do in IN_ENGINE:
                if client is None:
                    continue
                await self._in_engine(do, client, self._board.versions[ref.name])
                return True  # decide again: much may have happened meanwhile
            self._beside_engine(do, ref)
        return bool(todo)

    def _beside_engine(self, do: Do, ref: VersionRef) -> None:
        if do is Do.ADD:
            self._board.add(ref)
        elif do is Do.STAGE:
            self._board.move(ref.name, S.STAGING)
            self._staging[ref.name] = asyncio.create_task(self._stage(ref))
        elif do is Do.RETIRE:
            self._board.move(ref.name, S.RETIRING)
        elif do is Do.DROP:
            self._forget(self._board.versions[ref.name])

    async def _stage(self, ref: VersionRef) -> None:
        started = time.monotonic()
        version = self._board.versions[ref.name]
        try:
            staged = await in_thread(lambda: self._stager.stage(ref))
        except VersionRejected as rejection:
            self._board.counters.rejected[rejection.reason] += 1
            self._fail(version, f"refused: {rejection}")
        except StoreError as error:
            self._fail(version, f"could not be staged: {error}")
        else:
            version.folder, version.canary = staged.folder, staged.canary
            version.seconds["staging"] = round(time.monotonic() - started, 4)
            self._board.move(ref.name, S.STAGED)

    def _collect_staging(self) -> None:
        for name, task in list(self._staging.items()):
            if task.done():
                del self._staging[name]
                task.result()

    async def _in_engine(self, do: Do, client: VllmClient, version: Version) -> None:
        proving = int(do is Do.PROVE)  # loading generates no token, and has a time-out of its own
        self._supervisor.own_requests += proving
        try:
            if do is Do.LOAD:
                await self._load(client, version)
            elif do is Do.PROVE:
                await self._prove(client, version)
            else:
                await client.unload_adapter(version.ref.name)
                self._forget(version)
        except EngineUnreachable as silence:
            await self._interrupted(do, version, str(silence))
        except (EngineRefused, LoadFailed) as refusal:
            if do is not Do.UNLOAD and client is self._supervisor.client and await client.healthy():
                await self._fail_loaded(client, version, f"vLLM refused to {do} it: {refusal}")
            else:  # a dying engine refuses everything; an unload is tried again
                await self._interrupted(do, version, str(refusal))
        finally:
            self._supervisor.own_requests -= proving

    async def _load(self, client: VllmClient, version: Version) -> None:
        assert version.folder is not None
        started = time.monotonic()
        await load(client, version.ref.name, version.folder, self._board.counters)
        if client is self._supervisor.client:
            version.seconds["load"] = round(time.monotonic() - started, 4)
            self._board.move(version.ref.name, S.LOADED)

    async def _prove(self, client: VllmClient, version: Version) -> None:
        started = time.monotonic()
        verdict = await self._probe_once(client, version)
        if verdict.ok and version.canary is not None:
            spec = self._spec
            allowed = tolerance(version.canary.dtype, spec.dtype, spec.device, spec.canary_tolerance)
            verdict = await check_canary(client, version.ref.name, version.canary, allowed)
        if client is not self._supervisor.client:
            return  # another life of the engine: it is STAGED again
        version.seconds["canary"] = round(time.monotonic() - started, 4)
        if verdict.ok:
            self._board.move(version.ref.name, S.READY)
        else:
            await self._fail_loaded(client, version, verdict.reason or "not proved")

    async def _probe_once(self, client: VllmClient, version: Version) -> Verdict:
        epoch = self._board.engine_epoch
        if self._probed is None or self._probed[0] != epoch:
            assert version.folder is not None
            prompt = version.canary.prompt if version.canary else list(FALLBACK_PROMPT)
            verdict = await probe(client, self._spec.served_model_name, version.folder, prompt, self._spec.dtype)
            self._probed = (epoch, verdict)
        return self._probed[1]

    async def _interrupted(self, do: Do, version: Version, cause: str) -> None:
        """The engine went silent. Twice during the same version's steps, and the version is to blame."""
        if do is not Do.UNLOAD:
            version.strikes += 1
            if version.strikes >= MAX_STRIKES and version.state in (S.STAGED, S.LOADED):
                self._fail(version, f"vLLM died or hung {version.strikes} times while it was loaded or proved: {cause}")
        await asyncio.sleep(IDLE_S)  # the supervisor sees the death, or the engine recovers

    async def _fail_loaded(self, client: VllmClient, version: Version, reason: str) -> None:
        with contextlib.suppress(EngineRefused, EngineUnreachable):  # nobody is routed to it in any case
            await client.unload_adapter(version.ref.name)
        self._fail(version, reason)

    def _fail(self, version: Version, reason: str) -> None:
        log.error("version %s failed: %s", version.ref.name, reason)
        self._board.move(version.ref.name, S.FAILED, reason)

    def _forget(self, version: Version) -> None:
        """Its files may go now: vLLM re-reads those of a loaded adapter at any time, and dies if they are gone."""
        if version.folder is not None:
            try:
                self._stager.evict(version.ref)
            except OSError as error:
                log.warning("the files of %s stay behind: %s", version.ref.name, error)
            version.folder = None
        self._board.move(version.ref.name, S.UNLOADED)
