"""Which versions of a run may be deleted: a pure policy, and the little that carries it out.

Kept: what the fleet wants or has in flight, the newest few, every k-th, and the newest version of the run whatever else
holds. What earlier incarnations left goes once it is old. Only version files are ever named, and only exact keys.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from bucket_grpo.bucket_sync.current import Superseded, check_fence
from bucket_grpo.bucket_sync.proxy_client import ProxyError
from bucket_grpo.bucket_sync.store_contract import ObjectInfo, Store, StoreError
from bucket_grpo.bucket_sync.vocabulary import check_run_name, parse_version_key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetentionRules:
    """Args:
    window: how many of the newest versions of the running incarnation are kept; at least 1.
    every: versions whose number is a multiple of this are kept; 0 keeps none for that reason, 1 keeps all.
    dead_after: age of an earlier incarnation's newest version after which its versions go.
    """

    window: int = 16
    every: int = 0
    dead_after: timedelta = timedelta(days=7)

    def __post_init__(self) -> None:
        if self.window < 1 or self.every < 0:
            raise ValueError(f"window {self.window} must be at least 1, every {self.every} not negative")


def plan_retention(
    objects: Iterable[ObjectInfo],
    *,
    run: str,
    incarnation: str,
    wanted: Collection[str],
    rules: RetentionRules,
    now: datetime,
) -> list[str]:
    """The keys to delete, sorted. A listing may be old: what it does not show is not touched.

    Args:
        objects: what lies in the run's folder; anything but a version of `run` is left alone.
        wanted: keys of versions that the proxy wants or has in flight.
    """
    by_incarnation: dict[str, dict[int, ObjectInfo]] = {}
    for info in objects:
        try:
            owner, born, number = parse_version_key(info.key)
        except ValueError:
            continue
        if owner == run and born <= incarnation:  # a newer one took over: its versions are none of our business
            by_incarnation.setdefault(born, {})[number] = info
    if not by_incarnation:
        return []
    newest_incarnation = max(by_incarnation)
    doomed: list[str] = []
    for born, versions in by_incarnation.items():
        if born == incarnation:
            expendable = sorted(versions)[: -rules.window]
            if rules.every:
                expendable = [number for number in expendable if number % rules.every]
        elif _is_dead(versions.values(), now - rules.dead_after):
            expendable = sorted(versions)
        else:
            continue
        last = max(versions) if born == newest_incarnation else None
        doomed += [versions[n].key for n in expendable if n != last and versions[n].key not in wanted]
    return sorted(doomed)


def _is_dead(versions: Collection[ObjectInfo], before: datetime) -> bool:
    ages = [info.modified_at for info in versions]
    return all(modified_at is not None and modified_at < before for modified_at in ages)


class Janitor:
    """Carries the policy out for one run.

    Args:
        wanted: asks the proxy for the keys that must stay (`ProxyClient.wanted`); if it raises, nothing is deleted.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        incarnation: str,
        wanted: Callable[[], Collection[str]],
        rules: RetentionRules | None = None,
    ) -> None:
        self._store = store
        self._run, self._incarnation = check_run_name(run), incarnation
        self._wanted = wanted
        self._rules = rules or RetentionRules()
        self.deleted = 0

    def sweep(self) -> list[str]:
        """Delete what may go; returns its keys. Raises `Superseded`, `StoreError`, or what `wanted` raises."""
        check_fence(self._store, self._run, self._incarnation)
        objects = self._store.list(f"{self._run}/")
        # Asked after listing: what became wanted since the listing is newer than all that is listed.
        keys = plan_retention(
            objects,
            run=self._run,
            incarnation=self._incarnation,
            wanted=self._wanted(),
            rules=self._rules,
            now=datetime.now(UTC),
        )
        self._store.delete(keys)
        self.deleted += len(keys)
        return keys


class RetentionThread:
    """Sweeps every `interval_s` seconds until closed; a sweep that fails is logged, counted and tried again."""

    def __init__(self, janitor: Janitor, interval_s: float = 60.0) -> None:
        self._janitor = janitor
        self._interval_s = interval_s
        self._closing = threading.Event()
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)
        self._thread.start()

    def close(self, timeout: float = 30.0) -> None:
        self._closing.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self._janitor.sweep()
            except Superseded as error:
                log.info("retention ends: %s", error)
                return
            except (StoreError, ProxyError) as error:
                self.failures += 1
                log.warning("retention failed (%d times so far), nothing depends on it: %s", self.failures, error)
