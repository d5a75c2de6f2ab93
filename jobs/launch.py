"""Starting a run's jobs so that nobody pays for half a run, and ending them so that nobody pays for a dead one."""

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bucket_grpo.bucket_sync.current import claim, heartbeat, read_current
from bucket_grpo.bucket_sync.store_contract import Store
from bucket_grpo.jobs.hub import HubProblem, JobsHub, is_active, stage
from bucket_grpo.jobs.labels import TRAINER, name_of
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.settings import seconds

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

POLL_S = 2.0
# A job of ours that the Hub lost is missing from one listing or another: it is gone when it is missing in all of these.
MISSING_LOOKS = 3


class LaunchFailed(RuntimeError):
    """The run could not be started, or ended badly; nothing of it is left running. The message says why."""


def secrets_for(plan: Plan, token: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of every secret that the plan's jobs ask for. Raises `ValueError` for one that is not set here.

    The Hub's gateway reads the `Authorization` header, so behind it the agents' token is the Hub's; in a private
    network there is no gateway, and the token is one that only this incarnation knows.
    """
    private = plan.needs.jobs.network == "private"
    own = hmac.new(token.encode(), f"bucket-grpo:{plan.incarnation}".encode(), hashlib.sha256).hexdigest()
    values = {"HF_TOKEN": token, "BUCKET_GRPO_TOKEN": own if private else token}
    for name in plan.needs.jobs.trainer.secrets:
        if name not in values:
            if not environment.get(name):
                raise ValueError(f"jobs.trainer.secrets names {name}, which is not set here: export {name}=…")
            values[name] = environment[name]
    return values


@dataclass
class Launch:
    """One incarnation of a run, from its first object in the bucket to its last job.

    Args:
        hub, store: the namespace and the bucket.
        secrets: values by name, see `secrets_for`.
        say: told about progress, a line at a time.
    """

    hub: JobsHub
    store: Store
    plan: Plan
    secrets: Mapping[str, str]
    say: Callable[[str], None] = print
    pause: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    posted: list[str] = field(default_factory=list)

    def start(self, packed: Mapping[str, bytes]) -> None:
        """Fill the bucket and post every job. On any failure, also Ctrl-C, nothing is left running."""
        running = [name_of(job) for job in self.hub.active(run=self.plan.run)]
        if running:
            parts = ", ".join(sorted(name.part for name in running if name))
            raise LaunchFailed(
                f"run {self.plan.run} is running already ({parts}): "
                f"`bucket-grpo cancel {self.plan.run}` ends it, `bucket-grpo resume {self.plan.run}` replaces it"
            )
        with self.rolled_back():
            for key, data in packed.items():
                self.store.write_once(key, data)
            claim(self.store, self.plan.run, self.plan.incarnation)
            for request in self.plan.requests():
                job = self.hub.post(request, self.secrets)
                self.posted.append(job.id)
                self.say(f"{request.name.part}: job {job.id} on {request.flavor} {job.url}")
            for job_id in self.hub.cancel_doubles(**self._labels):
                self.say(f"job {job_id} was a double and is cancelled")

    def rolled_back(self) -> "_RollBack":
        return _RollBack(self)

    def wait_running(self) -> None:
        """Return once the trainer and at least one replica run. What is still waiting for a machine at the schedule
        timeout is given up: a single replica alone, anything else with the whole run. Raises `LaunchFailed`."""
        limit_s = seconds(self.plan.needs.jobs.schedule_timeout)
        deadline = self.clock() + limit_s
        with self.rolled_back():
            while True:
                by_part = self._by_part()
                self._refuse_failed(by_part)
                waiting = [part for part, job in by_part.items() if stage(job) == "SCHEDULING"]
                if not waiting:
                    return
                if self.clock() > deadline:
                    self._give_up(by_part, waiting, limit_s)
                    return
                self.pause(POLL_S)

    def wait(self) -> int:
        """Wait for the trainer job's end, then end the replicas; the exit status: 0 if it completed."""
        last, missing = "", 0
        try:
            while True:
                trainer = self._by_part().get(TRAINER)
                missing = missing + 1 if trainer is None else 0
                if missing >= MISSING_LOOKS:
                    raise LaunchFailed("the Hub does not know the trainer's job any more: `bucket-grpo resume` goes on")
                if trainer is not None:
                    if stage(trainer) != last:
                        last = stage(trainer)
                        self.say(
                            f"trainer: {last}" + (f" ({trainer.status.message})" if trainer.status.message else "")
                        )
                    if not is_active(trainer):
                        return 0 if last == "COMPLETED" else 1
                self.pause(POLL_S)
        finally:
            self.cancel("the launcher stopped waiting" if last in ("", "SCHEDULING", "RUNNING") else None)

    def cancel(self, reason: str | None = None) -> list[str]:
        """End every job of this incarnation; returns the parts that were still active."""
        ended = cancel_jobs(self.hub, **self._labels)
        if ended and reason:
            self.say(f"cancelled {', '.join(ended)}: {reason}")
        close_run(self.store, self.plan.run, self.plan.incarnation)
        return ended

    @property
    def _labels(self) -> dict[str, str]:
        return {"run": self.plan.run, "incarnation": self.plan.incarnation}

    def _by_part(self) -> dict[str, "JobInfo"]:
        """The newest job of each part."""
        return {name.part: job for job in self.hub.jobs(**self._labels) if (name := name_of(job))}

    def _refuse_failed(self, by_part: Mapping[str, "JobInfo"]) -> None:
        for part, job in by_part.items():
            if stage(job) in ("ERROR", "CANCELED", "DELETED"):
                words = [line for line in self.hub.logs(job.id, tail=5) if line.strip()]
                why = job.status.message or stage(job)
                last = f"; its last words: {words[-1]}" if words else ""
                raise LaunchFailed(f"job {part} ({job.id}) did not start: {why}{last}")

    def _give_up(self, by_part: Mapping[str, "JobInfo"], waiting: list[str], limit_s: int) -> None:
        running = [part for part, job in by_part.items() if stage(job) == "RUNNING"]
        if TRAINER in waiting or not [part for part in running if part != TRAINER]:
            raise LaunchFailed(
                f"{', '.join(waiting)} got no machine within {limit_s} s: try another flavor, or a longer "
                "--schedule-timeout"
            )
        for part in waiting:
            self.hub.cancel(by_part[part].id)
            self.say(f"{part} got no machine within {limit_s} s and is given up; the run goes on without it")


class _RollBack:
    """Ends what was started if the block raises; what was raised goes on."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        try:
            # By id as well: a listing may not show yet what was just posted.
            for job_id in self.launch.posted:
                self.launch.hub.cancel(job_id)
            self.launch.cancel("the launch failed")
        except HubProblem as problem:
            self.launch.say(f"could not end every job ({problem}): look at `bucket-grpo ps`; their time-outs end them")


def cancel_jobs(hub: JobsHub, **labels: str) -> list[str]:
    """Cancel every active job with these labels, the trainer first (it ends replicas too); returns their parts."""
    active = sorted(hub.active(**labels), key=lambda job: (job.labels or {}).get("role") != TRAINER)
    for job in active:
        hub.cancel(job.id)
    return [name.part for job in active if (name := name_of(job))]


def close_run(store: Store, run: str, incarnation: str) -> None:
    """Say in the bucket that this incarnation is over, unless it said so itself: replicas that live on end by it."""
    current = read_current(store, run)
    if current is not None and current.incarnation == incarnation and current.state == "running":
        heartbeat(store, current, "failed")
