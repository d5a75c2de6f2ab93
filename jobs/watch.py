"""How a run stands, asked of labels and bucket alone: from any machine with a token."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bucket_grpo.bucket_sync.store_contract import NotFound, Store, StoreError
from bucket_grpo.jobs.hardware import EXPOSED_USD_PER_HOUR, Prices, UnknownFlavor
from bucket_grpo.jobs.hub import JobsHub, is_active, running_usd, stage
from bucket_grpo.jobs.labels import TRAINER, name_of

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

STATUS_FILE = "status.json"


def status_key(run: str, incarnation: str) -> str:
    return f"{run}/{incarnation}/{STATUS_FILE}"


@dataclass(frozen=True)
class Row:
    """One job in the table of `ps`. Ages are in seconds, costs in US dollars; None where not known."""

    run: str
    incarnation: str
    part: str
    job: str
    stage: str
    flavor: str
    age_s: int | None
    usd: float | None
    message: str | None = None
    url: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """A run's newest incarnation: its jobs, and what the trainer job last said."""

    run: str
    incarnation: str
    active: bool
    usd: float | None
    rows: list[Row]
    said: dict[str, Any] | None
    """`status.json` of the trainer job: step, reward, versions, replicas; None if it said nothing yet."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def table(hub: JobsHub, prices: Prices, *, run: str | None = None, everything: bool = False) -> list[Row]:
    """One row for each job of ours: those that are active, or all that the Hub still knows."""
    labels = {} if run is None else {"run": run}
    return [_row(job, prices) for job in hub.jobs(**labels) if everything or is_active(job)]


def run_status(hub: JobsHub, store: Store | None, prices: Prices, run: str) -> RunStatus:
    """Raises `LookupError` if the Hub knows no job of this run."""
    jobs = hub.jobs(run=run)
    if not jobs:
        raise LookupError(f"the Hub knows no job of run {run!r} in {hub.namespace}: see `bucket-grpo ps --all`")
    newest = max(name.incarnation for job in jobs if (name := name_of(job)))
    rows = [_row(job, prices) for job in jobs if (job.labels or {})["incarnation"] == newest]
    return RunStatus(
        run,
        newest,
        any(row.stage in ("SCHEDULING", "RUNNING") for row in rows),
        None if any(row.usd is None for row in rows) else round(sum(row.usd or 0.0 for row in rows), 4),
        rows,
        None if store is None else read_status(store, run, newest),
    )


def read_status(store: Store, run: str, incarnation: str) -> dict[str, Any] | None:
    """What the trainer job last said of itself."""
    try:
        said: dict[str, Any] = json.loads(store.read(status_key(run, incarnation)))
    except NotFound:
        return None
    except ValueError as error:
        raise StoreError(f"{status_key(run, incarnation)} is not JSON: {error}") from error
    return said


def bucket_of(jobs: "list[JobInfo]") -> str | None:
    """The bucket that a run's jobs mount, as a URL; None if they mount none."""
    for job in jobs:
        for volume in job.volumes or []:
            if volume.type == "bucket":
                return f"hf://buckets/{volume.source}"
    return None


def _usd(job: "JobInfo", prices: Prices) -> float | None:
    """What the job has cost; None on hardware that has no price here, as where the Hub's list could not be had."""
    try:
        return round(running_usd([job], prices, EXPOSED_USD_PER_HOUR), 4)
    except UnknownFlavor:
        return None


def _row(job: "JobInfo", prices: Prices) -> Row:
    name = name_of(job)
    assert name is not None
    age_s = int((datetime.now(UTC) - job.created_at).total_seconds()) if job.created_at else None
    urls = job.status.expose_urls or []
    return Row(
        name.run,
        name.incarnation,
        name.part,
        job.id,
        stage(job),
        str(job.flavor),
        age_s,
        _usd(job, prices),
        job.status.message,
        urls[0] if urls else None,
    )


def wait_for_trainer(hub: JobsHub, run: str, incarnation: str, say: Callable[[str], None], poll_s: float = 2.0) -> int:
    """Wait until the trainer job is over; 0 if it completed, else 1. Ends nothing."""
    last = ""
    while True:
        trainers = hub.jobs(run=run, incarnation=incarnation, role=TRAINER)
        if not trainers:
            raise LookupError(f"run {run} has no trainer job: `bucket-grpo resume {run}` starts one")
        if stage(trainers[-1]) != last:
            last = stage(trainers[-1])
            say(f"trainer: {last}")
        if not is_active(trainers[-1]):
            return 0 if last == "COMPLETED" else 1
        time.sleep(poll_s)
