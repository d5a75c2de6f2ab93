"""The proxy's own use of the bucket; only if its config names one.

`POST /v1/load_lora_adapter` by path, for plain TRL scripts: pack, write, and wait until it is live. TRL's own order:
the call blocks, and the version can be asked for when it returns. Our trainer publishes by itself.
"""

import asyncio
import logging
import time
from pathlib import Path

from fastapi import HTTPException

from bucket_grpo.bucket_sync.current import Superseded, check_fence
from bucket_grpo.bucket_sync.store_contract import Store, StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.version_file import VersionRejected, pack_version, verify_version
from bucket_grpo.bucket_sync.vocabulary import VersionRef, version_key
from bucket_grpo.proxy.service import Service

CONFIRM_TIMEOUT_S = 90.0
LIVE_TIMEOUT_S = 600.0
log = logging.getLogger(__name__)


class Publishing:
    """Publishes adapters that lie on the proxy's disk. Raises `HTTPException` with the reason and what to do."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._one_at_a_time = asyncio.Lock()

    async def publish(self, number: int, path: str) -> None:
        config = self._service.config
        store = self._open()
        if store is None:
            raise HTTPException(
                400, "this proxy can't publish: set bucket in its config, or publish through POST /versions"
            )
        async with self._one_at_a_time:
            if number not in self._service.fleet.versions:
                try:
                    ref = await asyncio.to_thread(self._store, store, number, Path(path))
                except VersionRejected as rejected:
                    raise HTTPException(400, f"{path} is not an adapter that can be served: {rejected}") from rejected
                except OSError as error:
                    raise HTTPException(400, f"{path} can't be read here: {error}") from error
                except Superseded as superseded:
                    raise HTTPException(409, str(superseded)) from superseded
                except StoreError as error:
                    raise HTTPException(503, f"version {number} did not get into {config.bucket}: {error}") from error
                self._service.accept(ref)
        await self._until_live(number)

    async def recover(self) -> None:
        """After a restart that forgot them, read from the bucket what the versions are that agents hold."""
        store, service = self._open(), self._service
        while store is not None and service.fleet.rebuilding:
            for number in sorted(service.fleet.strangers()):
                try:
                    service.accept(await asyncio.to_thread(self._read_ref, store, number))
                except (StoreError, VersionRejected) as error:
                    log.warning("version %d is on a replica, but not to be had from the bucket: %s", number, error)
            await service.changed.wait(0.5)

    def _open(self) -> Store | None:
        config = self._service.config
        return None if config.bucket is None else open_store(config.bucket, confirm=config.confirm)

    def _read_ref(self, store: Store, number: int) -> VersionRef:
        config = self._service.config
        key = version_key(config.run, config.incarnation, number)
        return verify_version(store.read(key), base_model=config.base_model).ref

    def _store(self, store: Store, number: int, folder: Path) -> VersionRef:
        config = self._service.config
        data, ref = pack_version(
            folder,
            run=config.run,
            incarnation=config.incarnation,
            number=number,
            step=0,
            base_model=config.base_model,
            canary=None,
        )
        check_fence(store, config.run, config.incarnation)
        store.write_once(ref.key, data)
        store.confirm(ref.key, ref.size, CONFIRM_TIMEOUT_S)
        return ref

    async def _until_live(self, number: int) -> None:
        service = self._service
        deadline = time.monotonic() + LIVE_TIMEOUT_S
        while (found := service.fleet.liveness(number)) is not None:
            if found.state == "failed":
                raise HTTPException(500, f"version {number} failed on every replica: {found.reason}")
            if found.state != "pending":
                return
            if not await service.changed.wait(deadline - time.monotonic()):
                raise HTTPException(503, f"version {number} is not live after {LIVE_TIMEOUT_S:g} s: {found.reason}")
