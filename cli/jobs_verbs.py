"""The verbs about jobs: launch, ps, inspect, logs, wait, cancel, scale, resume, fetch, preflight."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from bucket_grpo.cli.errors import UserError
from bucket_grpo.cli.verbs import AsJson

RunName = Annotated[str, typer.Argument(help="name of the run, as in its run file", show_default=False)]
Namespace = Annotated[str | None, typer.Option(help="user or organization that the jobs belong to; default: you")]
Bucket = Annotated[str | None, typer.Option(help="hf://buckets/<namespace>/<name>; default: what the run file says")]
LOCAL_BUCKET = "hf://buckets/me/rl"
Role = Annotated[str | None, typer.Option(help="trainer or vllm; default: both")]


def register(app: typer.Typer) -> None:
    for verb in (launch, ps, inspect, logs, wait, cancel, scale, resume, fetch, preflight):
        app.command()(verb)


@contextmanager
def one_line() -> Iterator[None]:
    """Turn every problem that a person can mend into one line and exit status 1."""
    from bucket_grpo.jobs.actions import PROBLEMS

    try:
        yield
    except PROBLEMS as error:
        raise UserError(str(error)) from error


def say(line: str) -> None:
    """Progress goes to stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def launch(
    run_file: Annotated[Path, typer.Argument(help="run file, such as recipes/sanity-run5.yaml")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print every request and the cost, start nothing")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="stay until the end; Ctrl-C then ends every job")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="return once the jobs are posted")] = False,
    bucket: Bucket = None,
    namespace: Namespace = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="vLLM jobs")] = None,
    trainer_flavor: Annotated[str | None, typer.Option(help="hardware of the trainer's job")] = None,
    vllm_flavor: Annotated[str | None, typer.Option(help="hardware of the vLLM jobs")] = None,
    timeout: Annotated[str | None, typer.Option(help="longest life of every job, such as 4h")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps")] = None,
    network: Annotated[str | None, typer.Option(help="exposed (default) or private")] = None,
    schedule_timeout: Annotated[str | None, typer.Option(help="longest wait for a machine, such as 15m")] = None,
    alert: Annotated[str | None, typer.Option(help="webhook or command that is told why a run was ended")] = None,
    max_usd: Annotated[float | None, typer.Option(help="end the run, with a checkpoint, when it has cost this")] = None,
    no_progress: Annotated[str | None, typer.Option(help="end it after so long without a step, such as 15m")] = None,
    script: Annotated[Path | None, typer.Option(help="a TRL script of your own, run instead of our trainer")] = None,
    schedule: Annotated[str | None, typer.Option(help="start it at these times instead: cron, @daily, …")] = None,
    local: Annotated[
        bool, typer.Option("--local", help="on this machine, against an emulated Hub; implies --wait")
    ] = False,
    profile: Annotated[str, typer.Option(help="with --local: how mounted buckets behave")] = "hf-mount-2026-09",
    as_json: AsJson = False,
) -> None:
    """Start a run as Hugging Face Jobs: N vLLM jobs, one trainer job, and one bucket between them."""
    with one_line():
        from bucket_grpo.jobs.actions import LaunchFlags, show_launch, start
        from bucket_grpo.jobs.actions import schedule as schedule_launch
        from bucket_grpo.trainer.run_file import RunFile, RunFileError

        try:
            run = RunFile.load(run_file, {"max_steps": steps} if steps else None)
        except (RunFileError, OSError) as error:
            raise UserError(str(error)) from error
        flags = LaunchFlags(
            bucket=bucket,
            namespace=namespace,
            replicas=replicas,
            trainer_flavor=trainer_flavor,
            vllm_flavor=vllm_flavor,
            timeout=timeout,
            network=network,
            schedule_timeout=schedule_timeout,
            alert=alert,
            max_usd=max_usd,
            no_progress=no_progress,
            script=script,
        )
        base = run_file.resolve().parent
        if dry_run:
            shown = show_launch(run, flags, base)
            print(json.dumps(shown) if as_json else json.dumps(shown, indent=2))
            return
        if schedule:
            schedule_launch(run, flags, base, schedule, say)
            return
        if local:
            status = _launch_here(run, flags, base, profile)
            raise typer.Exit(status)
        until = "finished" if wait_ else "posted" if detach else "running"
        plan, status = start(run, flags, base, wait=until, say=say)
    if as_json:
        print(json.dumps({"run": plan.run, "incarnation": plan.incarnation, "exit_status": status}))
    else:
        say(f"next: bucket-grpo ps {plan.run} · bucket-grpo logs -f {plan.run} · bucket-grpo cancel {plan.run}")
    raise typer.Exit(status)


def _launch_here(run: Any, flags: Any, base: Path, profile: str) -> int:
    """`launch --local`: an emulated Hub, the launch, and the results in `runs/`."""
    from dataclasses import replace

    from bucket_grpo.jobs.actions import Found, fetch_results, signals_end, start
    from bucket_grpo.jobs.at_home import USER, emulated_hub, keep_logs

    folder = Path("runs") / f"{run.run_name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True)
    flags = replace(flags, trainer_flavor="cpu-basic", vllm_flavor="cpu-basic", namespace=USER, bucket=LOCAL_BUCKET)
    with signals_end(), emulated_hub(folder.resolve() / "hub", profile=profile, say=say):
        plan, status = start(run, flags, base, wait="finished", say=say)
        files = fetch_results(Found.of(plan), folder, versions=True)
    keep_logs(folder / "hub", folder / "logs")
    say(f"{len(files)} files in {folder}: next, bucket-grpo report {folder}")
    return status


def ps(
    run: Annotated[str | None, typer.Argument(help="only this run")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="also jobs that are over")] = False,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Which jobs run, for how long, and what they have cost."""
    with one_line():
        from bucket_grpo.jobs.actions import own_namespace
        from bucket_grpo.jobs.hub import JobsHub
        from bucket_grpo.jobs.watch import table

        hub = JobsHub(namespace or own_namespace())
        rows = table(hub, hub.prices(), run=run, everything=everything)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table("run", "part", "job", "stage", "flavor", "age", "cost", box=None)
    for row in rows:
        shown.add_row(
            row.run,
            row.part,
            row.job,
            row.stage,
            row.flavor,
            _age(row.age_s),
            "-" if row.usd is None else f"${row.usd:.2f}",
        )
    Console().print(shown if rows else "no job of yours runs; --all shows those that are over")


def inspect(run: RunName, namespace: Namespace = None, bucket: Bucket = None, as_json: AsJson = False) -> None:
    """How a run stands: its jobs, cost, last step, reward, versions and replicas."""
    with one_line():
        from bucket_grpo.jobs.actions import find
        from bucket_grpo.jobs.watch import run_status

        found = find(run, namespace=namespace, bucket=bucket)
        status = run_status(found.hub, found.store, found.hub.prices(), run)
    if as_json:
        print(json.dumps(status.as_json()))
        return
    spent = "cost not known" if status.usd is None else f"${status.usd:.2f} so far"
    print(f"{status.run} · incarnation {status.incarnation} · {spent}")
    for row in status.rows:
        print(f"  {row.part:10} {row.stage:11} {row.flavor:12} {_age(row.age_s):>8}  {row.message or row.url or ''}")
    for key, value in (status.said or {"state": "the trainer job has not said anything yet"}).items():
        if value not in (None, []):
            print(f"  {key}: {value}")


def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on until the job ends")] = False,
    role: Role = None,
    part: Annotated[str | None, typer.Option(help="one job, such as vllm-0")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="only the last lines")] = None,
    namespace: Namespace = None,
    bucket: Bucket = None,
) -> None:
    """What the jobs of a run print. Following shows the trainer's, unless another is named."""
    with one_line():
        from bucket_grpo.jobs.actions import find, role_jobs
        from bucket_grpo.jobs.labels import name_of

        found = find(run, namespace=namespace, bucket=bucket)
        jobs = [
            (name.part, job)
            for job in role_jobs(found, role or ("trainer" if follow and part is None else None))
            if (name := name_of(job)) and part in (None, name.part)
        ]
        if not jobs:
            raise LookupError(f"run {run} has no such job")
        for name_, job in jobs[-1:] if follow else jobs:
            for line in found.hub.logs(job.id, follow=follow, tail=tail):
                print(f"{name_} | {line}" if len(jobs) > 1 and not follow else line, flush=True)


def wait(run: RunName, namespace: Namespace = None, bucket: Bucket = None) -> None:
    """Wait for the end of a run; the exit status says how it ended. Ctrl-C stops waiting and ends nothing."""
    with one_line():
        from bucket_grpo.jobs.actions import find
        from bucket_grpo.jobs.watch import wait_for_trainer

        found = find(run, namespace=namespace, bucket=bucket)
        status = wait_for_trainer(found.hub, found.plan.run, found.plan.incarnation, say)
    raise typer.Exit(status)


def cancel(run: RunName, namespace: Namespace = None, bucket: Bucket = None) -> None:
    """End every job of a run."""
    with one_line():
        from bucket_grpo.jobs.actions import cancel as cancel_run
        from bucket_grpo.jobs.actions import find

        ended = cancel_run(find(run, namespace=namespace, bucket=bucket))
    say(f"cancelled: {', '.join(ended)}" if ended else "nothing was running")


def scale(
    run: RunName,
    replicas: Annotated[int, typer.Argument(min=1, help="how many vLLM jobs the run shall have")],
    namespace: Namespace = None,
    bucket: Bucket = None,
) -> None:
    """Give a running run more or fewer vLLM jobs."""
    with one_line():
        from bucket_grpo.jobs.actions import find
        from bucket_grpo.jobs.actions import scale as scale_run

        scale_run(find(run, namespace=namespace, bucket=bucket), replicas, say)


def resume(
    run: RunName,
    max_usd: Annotated[float | None, typer.Option(help="what this incarnation may cost; default: as before")] = None,
    wait_: Annotated[bool, typer.Option("--wait", help="stay until the end; Ctrl-C then ends every job")] = False,
    namespace: Namespace = None,
    bucket: Bucket = None,
) -> None:
    """Start a run again, as a new incarnation with the same plan; what still runs of the old one is ended."""
    with one_line():
        from bucket_grpo.jobs.actions import find
        from bucket_grpo.jobs.actions import resume as resume_run

        found = find(run, namespace=namespace, bucket=bucket)
        _, status = resume_run(found, wait="finished" if wait_ else "running", say=say, max_usd=max_usd)
    raise typer.Exit(status)


def fetch(
    run: RunName,
    folder: Annotated[Path | None, typer.Option(help="where to; default: runs/<run>")] = None,
    versions: Annotated[bool, typer.Option("--versions", help="the published versions too")] = False,
    namespace: Namespace = None,
    bucket: Bucket = None,
) -> None:
    """Bring a run's metrics, journal, logs and outcome from its bucket to this machine."""
    with one_line():
        from bucket_grpo.jobs.actions import fetch_results, find

        target = folder or Path("runs") / run
        files = fetch_results(find(run, namespace=namespace, bucket=bucket), target, versions=versions)
    say(f"{len(files)} files in {target}: next, bucket-grpo report {target}")


def preflight(
    run_file: Annotated[Path | None, typer.Argument(help="check what this run needs too")] = None,
    bucket: Bucket = None,
    namespace: Namespace = None,
    timeout: Annotated[str, typer.Option(help="longest life of the check's job")] = "5m",
    as_json: AsJson = False,
) -> None:
    """Try everything that a run rests on, with one small CPU job: token, bucket, mount, exposed port. Costs a cent."""
    with one_line():
        from bucket_grpo.jobs.preflight import run_preflight

        results = run_preflight(run_file, bucket=bucket, namespace=namespace, timeout=timeout, say=say)
    if as_json:
        print(json.dumps([asdict(result) for result in results]))
    else:
        _print_results(results)
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def _print_results(results: list[Any]) -> None:
    for result in results:
        print(f"{'ok  ' if result.ok else 'FAIL'} {result.name:34} {result.found}")
        if not result.ok and result.fix:
            print(f"     → {result.fix}")


def _age(age_s: int | None) -> str:
    if age_s is None:
        return "-"
    return f"{age_s}s" if age_s < 120 else f"{age_s // 60}m" if age_s < 7200 else f"{age_s / 3600:.1f}h"
