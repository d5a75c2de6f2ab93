"""Where objects live: one contract, several kinds. Callers name a store by a URL or a path, and that is all."""

from pathlib import Path

from bucket_grpo.bucket_sync.hub_store import URL_PREFIX, HubStore
from bucket_grpo.bucket_sync.mounted_store import MountedStore
from bucket_grpo.bucket_sync.store_contract import Conflict, NotConfirmed, NotFound, ObjectInfo, Store, StoreError

__all__ = [
    "Conflict",
    "HubStore",
    "MountedStore",
    "NotConfirmed",
    "NotFound",
    "ObjectInfo",
    "Store",
    "StoreError",
    "open_store",
]


def open_store(url: str | Path, *, confirm: str | Path | None = None) -> Store:
    """The store behind `hf://buckets/namespace/name` or a path.

    Args:
        confirm: for a mounted path, the URL of the bucket behind it (or the objects folder behind an emulated
            mount), which is asked whether a commit worked.
    """
    if str(url).startswith(URL_PREFIX):
        return HubStore(str(url))
    if "://" in str(url):
        raise StoreError(f"{url}: unknown kind of store; use a path or {URL_PREFIX}<namespace>/<name>")
    return MountedStore(Path(url), committed_in=None if confirm is None else open_store(confirm))
