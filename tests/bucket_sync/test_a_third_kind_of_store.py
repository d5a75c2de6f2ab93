"""A store over fsspec, in forty lines: no caller knows the difference."""

from collections.abc import Sequence

import fsspec
import pytest
from peft_folders import BASE, INCARNATION, RUN
from scripted_proxy import ScriptedProxy

from bucket_grpo.bucket_sync.checkpoints import restore_checkpoint, save_checkpoint
from bucket_grpo.bucket_sync.current import Superseded, claim, heartbeat
from bucket_grpo.bucket_sync.publisher import Publisher
from bucket_grpo.bucket_sync.retention import Janitor, RetentionRules
from bucket_grpo.bucket_sync.stager import Stager
from bucket_grpo.bucket_sync.store_contract import Conflict, NotConfirmed, NotFound, ObjectInfo, Store, StoreError


class FsspecStore:
    def __init__(self, url: str) -> None:
        self._files, self._root = fsspec.url_to_fs(url)

    def read(self, key: str, *, max_bytes: int = 2**40) -> bytes:
        try:
            data: bytes = self._files.cat_file(f"{self._root}/{key}")
        except FileNotFoundError as error:
            raise NotFound(key) from error
        if len(data) > max_bytes:
            raise StoreError(f"{key} is larger than {max_bytes}")
        return data

    def write_once(self, key: str, data: bytes) -> None:
        if self.committed_size(key) is None:
            self.write_pointer(key, data)
        elif self.read(key) != data:
            raise Conflict(key)

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        if self.committed_size(key) != size:
            raise NotConfirmed(key)

    def committed_size(self, key: str) -> int | None:
        path = f"{self._root}/{key}"
        return self._files.size(path) if self._files.exists(path) else None

    def write_pointer(self, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{key}", data)

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        found = self._files.find(f"{self._root}/{folder}", detail=True)
        return sorted(
            ObjectInfo(name[len(self._root) + 1 :], info["size"], info["created"]) for name, info in found.items()
        )

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self.committed_size(key) is not None:
                self._files.rm_file(f"{self._root}/{key}")


def test_publish_stage_retain_checkpoint_and_fence(tmp_path, adapter):
    store: Store = FsspecStore("memory://bucket")
    owner = claim(store, RUN, INCARNATION)
    proxy = ScriptedProxy()
    publisher = Publisher(store, proxy.url, run=RUN, incarnation=INCARNATION, base_model=BASE, max_staleness=4)
    try:
        for number in (1, 2, 3):
            publisher.submit(number, number, adapter(seed=number))
            publisher.wait_live(number, timeout=5)
    finally:
        publisher.close(timeout=5)
        proxy.stop()
    assert Stager(store, None, tmp_path / "staging", BASE).stage(proxy.announced[-1]).ref.number == 3

    assert len(Janitor(store, RUN, INCARNATION, set, RetentionRules(window=1)).sweep()) == 2

    save_checkpoint(store, adapter(), run=RUN, incarnation=INCARNATION, step=3)
    assert restore_checkpoint(store, RUN, tmp_path / "resumed").step == 3

    claim(store, RUN, "20261130t164500z-bbbbbb")
    with pytest.raises(Superseded):
        heartbeat(store, owner)
