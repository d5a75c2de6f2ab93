"""The port between this package and wherever objects live; every store keeps exactly this contract.

A further kind (S3 and friends through fsspec) is one more class with these methods: no caller changes.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from bucket_grpo.bucket_sync.version_file import MAX_VERSION_BYTES


class StoreError(Exception):
    """An operation did not do what it says, for now or for good. The message names store, key and cause."""


class NotFound(StoreError):
    """No object is visible under the key."""


class Conflict(StoreError):
    """The key holds other bytes. It will never hold yours: keys are not reused."""


class NotConfirmed(StoreError):
    """The object was handed over, but readers could not see it in time. Writing the same bytes again is the remedy."""


class ObjectInfo(NamedTuple):
    key: str
    size: int
    modified_at: datetime | None  # UTC


class Store(Protocol):
    """Objects under keys such as `run/incarnation/v000014.safetensors`; whole objects, no ranges, no appends.

    Two kinds of objects:
    - **records** (`write_once`): immutable, under a key that is used once. A reader that sees the key may still see a
      part of it or nothing for a while (a crashed writer, a stale cache): it checks size and hash, which it was told.
    - **pointers** (`write_pointer`): small, replaced in place. A reader may see the old value for as long as the store
      caches (tens of seconds on a mount); on some stores it may see half of the new one, so pointers are JSON and what
      does not parse is read again.

    Visibility: `write_once` returns when the store has taken the object, which says nothing about readers.
    `confirm` returns when a reader elsewhere can fetch it. Nobody is told of a key before that.

    Reading: ask only for keys that you were told exist. A mount remembers a missing name for up to 30 s, so a probe
    that comes too early hides the object from its reader; that is why there is no `exists`, and why `list` is for
    housekeeping, not for news (a mount's listing is up to 30 s old).

    Errors: all are `StoreError`. One writer per prefix: nothing here locks. Calls are bounded in time, except on a
    mount whose kernel side hangs: call those from a thread that you can abandon. Instances may be used by threads.
    """

    def read(self, key: str, *, max_bytes: int = MAX_VERSION_BYTES) -> bytes:
        """The whole object. Raises `NotFound`; `StoreError` also if it is larger than `max_bytes`."""

    def write_once(self, key: str, data: bytes) -> None:
        """Hand over a record. The same bytes again are a no-op (and are handed over again if they were lost on the
        way); other bytes under the key raise `Conflict`."""

    def confirm(self, key: str, size: int, timeout_s: float) -> None:
        """Wait until readers elsewhere can see the record with `size` bytes; raises `NotConfirmed`. Writers only."""

    def committed_size(self, key: str) -> int | None:
        """The size of the object that readers elsewhere can see, or None. Writers only (see Reading)."""

    def write_pointer(self, key: str, data: bytes) -> None:
        """Replace a pointer."""

    def list(self, folder: str) -> Sequence[ObjectInfo]:
        """Every object below `folder`, which is "" or ends with "/"; sorted by key. A missing folder is empty."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete exactly these keys; one that is gone already is a success. `StoreError` names what is still there."""


def check_key(key: str) -> str:
    """Return `key` if it cannot leave the bucket, else raise `StoreError`. Hidden names are the stores' own."""
    parts = key.split("/")
    if not all(parts) or any(part.startswith(".") for part in parts) or set(key) & set("\\\0\n\r"):
        raise StoreError(f"{key!r} is not the key of an object: use relative paths without '.', '..' or hidden names")
    return key


def check_folder(folder: str) -> str:
    if folder:
        if not folder.endswith("/"):
            raise StoreError(f"{folder!r} is not a folder: end it with '/', or siblings with the same prefix match too")
        check_key(folder[:-1])
    return folder
