"""Bringing records to a store for sure: write, confirm, and write again what was lost, a bounded number of times."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bucket_grpo.bucket_sync.store_contract import Conflict, Store, StoreError

log = logging.getLogger(__name__)

BYTES_PER_S = 10e6  # slower than this, an upload counts as lost


@dataclass
class Handover:
    """How long the last write and confirmation took, in seconds, and how many records had to be written again."""

    write_s: float = 0.0
    confirm_s: float = 0.0
    retries: int = 0


def hand_over(
    store: Store, records: Mapping[str, Callable[[], bytes]], *, attempts: int = 3, confirm_s: float = 45.0
) -> Handover:
    """Write every record, then confirm each: a mount commits what is written together in one batch.

    Args:
        records: key → how to get its bytes; called once per attempt, so a big folder need not fit into memory.
        confirm_s: for one attempt, beside a second per 10 MB of all records.

    Raises:
        StoreError: something is still missing after `attempts`.
        Conflict: a key holds other bytes; at once.
    """
    done, missing = Handover(), dict(records)
    for attempt in range(1, attempts + 1):
        started, sizes, problem = time.monotonic(), {}, None
        for key, load in missing.items():
            data = load()
            try:
                store.write_once(key, data)
                sizes[key] = len(data)
            except Conflict:
                raise
            except StoreError as error:
                problem = error
        written = time.monotonic()
        deadline = written + confirm_s + sum(sizes.values()) / BYTES_PER_S
        for key, size in sizes.items():
            try:
                store.confirm(key, size, max(0.0, deadline - time.monotonic()))
                del missing[key]
            except StoreError as error:
                problem = error
        done.write_s, done.confirm_s = written - started, time.monotonic() - written
        if problem is None:
            return done
        if attempt == attempts:
            raise problem
        done.retries += len(missing)
        log.warning("attempt %d to store %d records failed, trying again: %s", attempt, len(missing), problem)
    raise AssertionError("unreachable: the last attempt returns or raises")
