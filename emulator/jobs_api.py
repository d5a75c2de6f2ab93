"""The Hub's REST calls for jobs, in the shapes that `huggingface_hub` 1.33 to 2.4 sends and reads."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bucket_grpo.emulator.hub_cas import base_url, hub_of
from bucket_grpo.emulator.hub_control import require_admin
from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.hub_routes import known_caller, visible_bucket
from bucket_grpo.emulator.jobs_hardware import hardware
from bucket_grpo.emulator.jobs_record import ExposeSpec, Job, JobSpec
from bucket_grpo.emulator.jobs_runner import JobRunner
from bucket_grpo.emulator.tokens import Identity
from bucket_grpo.runtime.guard import descendants

JOBS = "/api/jobs/{namespace}"
JOB = f"{JOBS}/{{job_id}}"
PAGE = 100
KEEP_ALIVE_S = 15.0


def runner_of(request: Request) -> JobRunner:
    runner: JobRunner = hub_of(request).jobs
    return runner


def _caller(request: Request, *, write: bool = False) -> Identity:
    identity, namespace = known_caller(request), request.path_params["namespace"]
    if not identity.owns(namespace):
        raise HubError(403, f"You don't have the rights to see or run jobs in the namespace {namespace!r}", "Forbidden")
    if write:
        identity.require_write(namespace)
    return identity


def _job(request: Request) -> Job:
    job = runner_of(request).jobs.get(request.path_params["job_id"])
    if job is None or job.stage == "DELETED" or job.namespace != request.path_params["namespace"]:
        raise HubError(404, f"Job {request.path_params['job_id']} not found")
    return job


async def _spec(request: Request) -> JobSpec:
    try:
        return JobSpec.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HubError(400, f"{where}: {first['msg'].removeprefix('Value error, ')}") from error


async def run(request: Request) -> Response:
    identity, spec = _caller(request, write=True), await _spec(request)
    return JSONResponse(_submit(request, identity, spec).shown())


def _submit(request: Request, identity: Identity, spec: JobSpec) -> Job:
    for volume in spec.volumes:
        if volume.type != "bucket":
            raise HubError(400, f"volume {volume.source}: the emulated Hub holds buckets only, not a {volume.type}")
        if not volume.mount_path.startswith("/"):
            raise HubError(400, f"volume {volume.source}: mount path {volume.mount_path!r} is not absolute")
        bucket = visible_bucket(request, volume.source, identity)
        if not volume.read_only:
            identity.require_write(bucket.namespace)
    return runner_of(request).submit(request.path_params["namespace"], identity.user.name, spec)


def jobs(request: Request) -> Response:
    _caller(request)
    wanted = [label.partition("=")[::2] for label in request.query_params.getlist("label")]
    stages = request.query_params.getlist("stage")
    found = [
        job
        for job in reversed(runner_of(request).jobs.values())
        if job.namespace == request.path_params["namespace"]
        and job.stage != "DELETED"
        and all(job.spec.labels.get(key) == value for key, value in wanted)
        and (not stages or job.stage in stages)
    ]
    start = int(request.query_params.get("cursor", 0))
    headers = {}
    if start + PAGE < len(found):
        query = [(k, v) for k, v in request.query_params.multi_items() if k != "cursor"]
        url = f"{base_url(request)}{request.url.path}?{urlencode([*query, ('cursor', start + PAGE)])}"
        headers["Link"] = f'<{url}>; rel="next"'
    return JSONResponse([job.shown() for job in found[start : start + PAGE]], headers=headers)


def inspect(request: Request) -> Response:
    _caller(request)
    return JSONResponse(_job(request).shown())


async def cancel(request: Request) -> Response:
    _caller(request, write=True)
    job = _job(request)
    await runner_of(request).end(job, "CANCELED")
    return JSONResponse(job.shown())


async def duplicate(request: Request) -> Response:
    identity = _caller(request, write=True)
    return JSONResponse(_submit(request, identity, _job(request).spec.model_copy(deep=True)).shown())


async def labels(request: Request) -> Response:
    _caller(request, write=True)
    job, wanted = _job(request), json.loads(await request.body()).get("labels", {})
    try:
        job.spec = JobSpec.model_validate(job.spec.model_dump() | {"labels": wanted})
    except ValidationError as error:
        raise HubError(400, error.errors()[0]["msg"]) from error
    return JSONResponse(job.shown())


async def expose(request: Request) -> Response:
    _caller(request, write=True)
    job = _job(request)
    job.spec = job.spec.model_copy(update={"expose": ExposeSpec.model_validate_json(await request.body())})
    await runner_of(request).expose_again(job)
    return JSONResponse(job.shown())


def list_hardware(_request: Request) -> Response:
    return JSONResponse(hardware())


def _stream(events: AsyncIterator[str]) -> Response:
    # Clients from 2.x on take events that are newer than `Date` for ones that came after they asked.
    headers = {"Cache-Control": "no-cache", "Date": formatdate(usegmt=True)}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def logs(request: Request) -> Response:
    _caller(request)
    tail = request.query_params.get("tail")
    return _stream(_log_events(runner_of(request), _job(request), int(tail) if tail else None))


async def _log_events(runner: JobRunner, job: Job, tail: int | None) -> AsyncIterator[str]:
    position = max(0, len(job.log) - tail) if tail is not None else 0
    while True:
        while position < len(job.log):
            data, timestamp = job.log[position]
            position += 1
            yield f"data: {json.dumps({'data': data, 'timestamp': timestamp})}\n\n"
        if job.final or runner.closing:
            return
        before = len(job.log)
        await runner.wait_for_change(KEEP_ALIVE_S)
        if len(job.log) == before and not job.final:
            yield ": keep-alive\n\n"


async def metrics(request: Request) -> Response:
    _caller(request)
    job = _job(request)
    if job.stage != "RUNNING":
        raise HubError(500, "metrics are there only while a job runs")
    return _stream(_metric_events(runner_of(request), job))


async def _metric_events(runner: JobRunner, job: Job) -> AsyncIterator[str]:
    previous = await run_in_threadpool(_usage, job)
    while job.stage == "RUNNING" and not runner.closing:
        await asyncio.sleep(1.0)
        usage = await run_in_threadpool(_usage, job)
        passed_s = usage["at"] - previous["at"]
        cores = max(0.0, (usage["cpu_s"] - previous["cpu_s"]) / passed_s)
        sample = {
            "cpu_usage_pct": round(100 * cores / (os.cpu_count() or 1)),
            "cpu_millicores": 1000 * (os.cpu_count() or 1),
            "memory_used_bytes": usage["memory"],
            "memory_total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            # What leaves the machine's side of the pair arrives in the job.
            "rx_bps": round(8 * (usage["to_job"] - previous["to_job"]) / passed_s),
            "tx_bps": round(8 * (usage["from_job"] - previous["from_job"]) / passed_s),
            "gpus": {},
            "replica": job.id[-5:],
        }
        previous = usage
        yield f"event: metric\ndata: {json.dumps(sample)}\n\n"


def _usage(job: Job) -> dict[str, float]:
    """CPU seconds, resident bytes and network bytes of a job's process tree so far."""
    ticks, pages = 0, 0
    for pid in descendants(job.pid) if job.pid else []:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    return {
        "at": time.monotonic(),
        "cpu_s": ticks / os.sysconf("SC_CLK_TCK"),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "to_job": _counter(job.veth, "tx_bytes"),
        "from_job": _counter(job.veth, "rx_bytes"),
    }


def _counter(veth: str | None, name: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{veth}/statistics/{name}").read_text())
    except (FileNotFoundError, OSError):
        return 0  # a plain process has no interface of its own


async def lose(request: Request) -> Response:
    """Fault on demand: the machine under a job is gone. Its processes die; with `forget`, its record too."""
    require_admin(request)
    runner = runner_of(request)
    job = runner.jobs.get(request.path_params["job_id"])
    if job is None:
        raise HubError(404, "no such job")
    forget = request.query_params.get("forget") == "1"
    await runner.end(job, "DELETED" if forget else "ERROR", "Job lost: the machine is gone (fault on demand)")
    return JSONResponse(job.shown())


async def faults(request: Request) -> Response:
    """Set `schedule_forever` (number of jobs), `match` (text in a label) and `gateway_cut_after_s`."""
    require_admin(request)
    faults = runner_of(request).faults
    wishes: dict[str, Any] = json.loads(await request.body())
    unknown = wishes.keys() - vars(faults).keys()
    if unknown:
        raise HubError(400, f"unknown fault {sorted(unknown)[0]!r}: known are {', '.join(vars(faults))}")
    for name, value in wishes.items():
        setattr(faults, name, value)
    return JSONResponse(vars(faults))


def routes() -> list[Route]:
    return [
        Route("/api/jobs/hardware", list_hardware),
        Route(JOBS, run, methods=["POST"]),
        Route(JOBS, jobs),
        Route(JOB, inspect),
        Route(f"{JOB}/cancel", cancel, methods=["POST"]),
        Route(f"{JOB}/duplicate", duplicate, methods=["POST"]),
        Route(f"{JOB}/labels", labels, methods=["PUT"]),
        Route(f"{JOB}/expose", expose, methods=["PUT"]),
        Route(f"{JOB}/logs", logs),
        Route(f"{JOB}/metrics", metrics),
        Route("/_emulator/jobs/{job_id}/lose", lose, methods=["POST"]),
        Route("/_emulator/job-faults", faults, methods=["POST"]),
    ]
