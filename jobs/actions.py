"""One function for each verb about jobs: what the command line does, without the command line."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bucket_grpo.bucket_sync.current import Superseded
from bucket_grpo.bucket_sync.store_contract import Store, StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.vocabulary import VERSION_KEY, later_incarnation, mint_incarnation
from bucket_grpo.jobs.hardware import documented_prices
from bucket_grpo.jobs.hub import HubProblem, JobsHub, is_active
from bucket_grpo.jobs.labels import VLLM, name_of
from bucket_grpo.jobs.launch import Launch, LaunchFailed, cancel_jobs, close_run, secrets_for
from bucket_grpo.jobs.plan import BUCKET_URL, MOUNT, PORT, Cost, Plan, dry_run, needs_of, parse_bucket
from bucket_grpo.jobs.travel import PLAN_FILE, local_files, pack, read_plan
from bucket_grpo.jobs.watch import bucket_of
from bucket_grpo.jobs.wheel import version

if TYPE_CHECKING:
    from bucket_grpo.trainer.run_file import RunFile

PLACEHOLDER = "your-namespace"
DEFAULT_BUCKET = "bucket-grpo"
PROBLEMS = (HubProblem, LaunchFailed, StoreError, Superseded, ValueError, LookupError)
"""What a person can mend: shown as one line."""


@dataclass(frozen=True)
class LaunchFlags:
    """Flags of `launch` that win over the run file; None where it decides."""

    bucket: str | None = None
    namespace: str | None = None
    replicas: int | None = None
    trainer_flavor: str | None = None
    vllm_flavor: str | None = None
    timeout: str | None = None
    network: str | None = None
    schedule_timeout: str | None = None
    alert: str | None = None
    max_usd: float | None = None
    no_progress: str | None = None
    script: Path | None = None

    def apply(self, run_file: "RunFile") -> "RunFile":
        jobs = run_file.jobs.model_dump(exclude_unset=True)
        trainer, vllm = jobs.setdefault("trainer", {}), jobs.setdefault("vllm", {})
        for block, name, value in (
            (trainer, "flavor", self.trainer_flavor),
            (vllm, "flavor", self.vllm_flavor),
            (vllm, "replicas", self.replicas),
            (trainer, "timeout", self.timeout),
            (vllm, "timeout", self.timeout),
        ):
            if value is not None:
                block[name] = value
        if self.trainer_flavor or self.vllm_flavor or self.replicas:
            # Measured on other hardware: it says nothing about this one.
            jobs.pop("expected_hours", None)
            jobs.pop("expected_hours_source", None)
        wishes = {"max_usd": self.max_usd, "no_progress": self.no_progress}
        budget = run_file.budget.model_copy(update={key: value for key, value in wishes.items() if value is not None})
        return run_file.model_copy(update={"jobs": type(run_file.jobs).model_validate(jobs), "budget": budget})


def plan_launch(
    run_file: "RunFile", flags: LaunchFlags, base: Path, default_namespace: str
) -> tuple[Plan, str, dict[str, Path]]:
    """The plan, the resolved run file as YAML, and the files that travel. `base` is the folder of the run file."""
    run_file = flags.apply(run_file)
    bucket = flags.bucket or run_file.bucket or f"{BUCKET_URL}{flags.namespace or default_namespace}/{DEFAULT_BUCKET}"
    files = local_files(run_file.reward_funcs, run_file.dataset_name, base)
    if flags.script is not None:
        files |= local_files([str(flags.script.resolve())], None, base)
    run_file = run_file.model_copy(update={"bucket": bucket})
    needs = needs_of(
        run_file,
        bucket=bucket,
        network=flags.network,
        schedule_timeout=flags.schedule_timeout,
        alert=flags.alert,
    )
    plan = Plan.of(
        needs,
        mint_incarnation(),
        version(),
        namespace=flags.namespace,
        files={name: path.name for name, path in files.items()},
        script=str(flags.script.resolve()) if flags.script else None,
    )
    check_replica(plan)
    return plan, run_file.dump(), files


def check_replica(plan: Plan) -> None:
    """Refuse here what the agent would refuse in its job. Raises `ValueError` in one line."""
    from bucket_grpo.inference.spec import ReplicaSpec

    try:
        ReplicaSpec.model_validate(plan.agent_spec("vllm-0", Path(MOUNT), PORT, Path("/tmp"), gpu=True))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(["jobs.vllm", *map(str, problem["loc"])])
        raise ValueError(f"{where}: {problem['msg'].removeprefix('Value error, ')}") from error


def show_launch(run_file: "RunFile", flags: LaunchFlags, base: Path) -> dict[str, Any]:
    """`launch --dry-run`: every request, the cost and the memory estimate. Asks nobody anything."""
    plan, _, _ = plan_launch(run_file, flags, base, PLACEHOLDER)
    return dry_run(plan, documented_prices())


def own_namespace() -> str:
    """The name of the user behind this machine's token. One call, which the Hub rate-limits: do not repeat it."""
    import httpx
    from huggingface_hub import HfApi, get_token

    from bucket_grpo.jobs.hub import explain, set_timeouts

    if not get_token():
        raise HubProblem("no Hugging Face token: run `hf auth login`, or set HF_TOKEN to one with the role 'write'")
    set_timeouts()
    try:
        return str(HfApi().whoami()["name"])
    except httpx.HTTPError as error:
        raise HubProblem(f"cannot see whose token this is: {explain(error)}") from error


def start(
    run_file: "RunFile", flags: LaunchFlags, base: Path, *, wait: str, say: Callable[[str], None]
) -> tuple[Plan, int]:
    """`launch`: start every job; `wait` is `posted`, `running` or `finished`. Returns the plan and the exit status."""
    plan, run_yaml, files = plan_launch(run_file, flags, base, namespace_of(run_file, flags))
    hub = JobsHub(plan.namespace)
    prices = hub.prices()
    cost = dry_run(plan, prices)
    secrets = secrets_for(plan, hub.token, os.environ)
    hub.create_bucket(plan.bucket_id)
    store = open_store(plan.needs.bucket)
    launch = Launch(hub, store, plan, secrets, say)
    total = "" if cost["cost_usd"] is None else f", about ${cost['cost_usd']:.2f} in all"
    say(f"run {plan.run}, incarnation {plan.incarnation}: ${cost['cost_usd_per_hour']:.2f} an hour{total}")
    with signals_end():
        launch.start(pack(plan, run_yaml, files))
        return plan, _after_start(launch, wait)


def schedule(run_file: "RunFile", flags: LaunchFlags, base: Path, when: str, say: Callable[[str], None]) -> str:
    """`launch --schedule`: leave the plan in the bucket and let a small job start it at each time of the schedule.

    Returns the scheduled job's id. A run that is still going when its time comes again is left alone.
    """
    plan, run_yaml, files = plan_launch(run_file, flags, base, namespace_of(run_file, flags))
    hub = JobsHub(plan.namespace)
    Cost.of(plan, hub.prices())
    hub.create_bucket(plan.bucket_id)
    store = open_store(plan.needs.bucket)
    for key, data in pack(plan, run_yaml, files).items():
        store.write_once(key, data)
    job_id = hub.schedule(plan.launcher(), secrets_for(plan, hub.token, os.environ), when)
    say(f"scheduled job {job_id}: {plan.run} starts at {when}; `hf jobs scheduled delete {job_id}` ends that")
    return job_id


def namespace_of(run_file: "RunFile", flags: LaunchFlags) -> str:
    """Whose jobs these will be, without asking the Hub where a flag or the bucket says it."""
    bucket = flags.bucket or run_file.bucket
    return flags.namespace or (parse_bucket(bucket)[0] if bucket else own_namespace())


def _after_start(launch: Launch, wait: str) -> int:
    if wait == "posted":
        return 0
    launch.wait_running()
    launch.say("running: the trainer job looks after the rest, this machine may be switched off")
    return launch.wait() if wait == "finished" else 0


@dataclass(frozen=True)
class Found:
    """A run as it is on the Hub and in its bucket."""

    hub: JobsHub
    store: Store
    plan: Plan

    @classmethod
    def of(cls, plan: Plan) -> "Found":
        return cls(JobsHub(plan.namespace), open_store(plan.needs.bucket), plan)


def find(run: str, *, namespace: str | None, bucket: str | None) -> Found:
    """The newest incarnation of a run. Raises `LookupError` if the Hub knows no job of it."""
    hub = JobsHub(namespace or own_namespace())
    jobs = hub.jobs(run=run)
    if not jobs:
        raise LookupError(f"the Hub knows no job of run {run!r} in {hub.namespace}: see `bucket-grpo ps --all`")
    incarnation = max(name.incarnation for job in jobs if (name := name_of(job)))
    where = bucket or bucket_of(jobs)
    if where is None:
        raise LookupError(f"the jobs of run {run} mount no bucket: name it with --bucket")
    store = open_store(where)
    return Found(hub, store, read_plan(store, run, incarnation))


def cancel(found: Found) -> list[str]:
    """`cancel`: end every job of the run, whatever its incarnation, and say in the bucket that it is over."""
    ended = cancel_jobs(found.hub, run=found.plan.run)
    close_run(found.store, found.plan.run, found.plan.incarnation)
    return ended


def scale(found: Found, replicas: int, say: Callable[[str], None]) -> None:
    """`scale`: more or fewer replicas of a running run. The trainer job sees it at its next look."""
    if replicas < 1:
        raise ValueError("a run needs at least one replica: `bucket-grpo cancel` ends it")
    plan = replace(found.plan, replicas=replicas)
    labels = {"run": plan.run, "incarnation": plan.incarnation}
    active = {name.part: job for job in found.hub.active(**labels) if (name := name_of(job))}
    if "trainer" not in active:
        raise LookupError(f"run {plan.run} has no running trainer job: `bucket-grpo resume {plan.run}` starts it again")
    # First the plan: a replica that is cancelled while the plan still has it would be a lost one.
    found.store.write_pointer(f"{plan.launch_folder}{PLAN_FILE}", plan.dump())
    secrets = secrets_for(plan, found.hub.token, os.environ)
    for index in range(replicas):
        if f"vllm-{index}" not in active:
            job = found.hub.post(plan.replica(index), secrets)
            say(f"vllm-{index}: job {job.id} on {plan.needs.jobs.vllm.flavor}")
    wanted = {f"vllm-{index}" for index in range(replicas)}
    for part, job in active.items():
        name = name_of(job)
        if name and name.role == VLLM and part not in wanted:
            found.hub.cancel(job.id)
            say(f"{part}: cancelled")


def resume(found: Found, *, wait: str, say: Callable[[str], None], max_usd: float | None = None) -> tuple[Plan, int]:
    """`resume`: a new incarnation with the old one's plan and files; what still runs of the old one is ended first.

    Its budget counts anew; `max_usd` replaces the plan's.
    """
    old = found.plan
    if max_usd is not None:
        budget = old.needs.budget.model_copy(update={"max_usd": max_usd})
        found = replace(found, plan=replace(old, needs=old.needs.model_copy(update={"budget": budget})))
    for part in cancel_jobs(found.hub, run=old.run):
        say(f"{part} of incarnation {old.incarnation}: cancelled")
    for _ in range(15):  # cancelled jobs are listed as active for a moment
        if not found.hub.active(run=old.run):
            break
        time.sleep(2.0)
    return start_again(found, resumes=old.incarnation, wait=wait, say=say)


def start_again(found: Found, *, resumes: str | None = None, wait: str, say: Callable[[str], None]) -> tuple[Plan, int]:
    """A new incarnation with the plan and files of an earlier one; from its newest checkpoint if it `resumes` it."""
    old = found.plan
    plan = replace(old, incarnation=later_incarnation(old.incarnation), resumes=resumes)
    packed = {f"{plan.launch_folder}{PLAN_FILE}": plan.dump()}
    for entry in found.store.list(old.launch_folder):
        name = entry.key.removeprefix(old.launch_folder)
        if name != PLAN_FILE:
            packed[f"{plan.launch_folder}{name}"] = found.store.read(entry.key)
    launch = Launch(found.hub, found.store, plan, secrets_for(plan, found.hub.token, os.environ), say)
    with signals_end():
        launch.start(packed)
        return plan, _after_start(launch, wait)


def fetch_results(found: Found, folder: Path, *, versions: bool = False) -> list[Path]:
    """Bring a run's results from the bucket into `folder`; `versions` too, where `audit` looks for them: `bucket/`."""
    prefix = f"{found.plan.run}/{found.plan.incarnation}/"
    results = f"{prefix}results/"
    targets = {entry.key: folder / entry.key.removeprefix(results) for entry in found.store.list(results)}
    if versions:
        listed = [entry.key for entry in found.store.list(prefix)]
        targets |= {key: folder / "bucket" / key for key in listed if VERSION_KEY.match(key)}
    for key, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(found.store.read(key))
    return list(targets.values())


def role_jobs(found: Found, role: str | None) -> list[Any]:
    """The jobs of the newest incarnation, of one role or of all; active ones last, so that their logs come last."""
    labels = {"run": found.plan.run, "incarnation": found.plan.incarnation} | ({"role": role} if role else {})
    return sorted(found.hub.jobs(**labels), key=is_active)


class signals_end:
    """Within the block, SIGTERM and SIGHUP end the process as Ctrl-C does: through every `finally`."""

    def __enter__(self) -> None:
        def end(number: int, _frame: FrameType | None) -> None:
            sys.exit(128 + number)

        self._before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
