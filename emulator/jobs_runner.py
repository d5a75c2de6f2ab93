"""Runs emulated jobs: SCHEDULING → RUNNING → COMPLETED, ERROR or CANCELED, each a real process tree.

Where this user may make namespaces (root), a job has its own root, mounts, processes and network. Elsewhere it is a
plain process tree: its volumes lie at mapped paths and its ports are mapped to free ones, and both are replaced in its
command and environment. The image is not used in either case: the commands come from this machine.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucket_grpo.emulator.hub_errors import HubError
from bucket_grpo.emulator.jobs_environment import Surroundings, clean_environment, hosts_text, members_of
from bucket_grpo.emulator.jobs_gateway import Gateway
from bucket_grpo.emulator.jobs_network import JobNetwork, NetworkRefused
from bucket_grpo.emulator.jobs_record import Job, JobSpec
from bucket_grpo.emulator.tokens import TokenBook
from bucket_grpo.runtime.guard import descendants


@dataclass
class JobOptions:
    """How the emulated cluster behaves. Times are in seconds."""

    namespaces: bool = True
    """False: plain processes also where namespaces could be had."""
    schedule_s: float = 0.2
    stop_grace_s: float = 5.0
    """From SIGTERM to SIGKILL when a job is cancelled or times out."""
    flush_grace_s: float = 10.0
    """How long a mount may flush when its job ends; 0 loses what was not flushed."""
    mount_options: list[str] = field(default_factory=list)
    """Passed on to `bucket_grpo.emulator mount`: `--profile …`, `--time-scale …`."""


@dataclass
class JobFaults:
    """Faults on demand. Counts are of jobs still to be hit."""

    schedule_forever: int = 0
    match: str = ""
    """Only jobs with this text in a label's value are hit."""
    gateway_cut_after_s: float | None = None
    """The gateway cuts a request that takes longer."""

    def hits(self, job: Job) -> bool:
        if self.schedule_forever and any(self.match in value for value in job.spec.labels.values()):
            self.schedule_forever -= 1
            return True
        return False


class JobRunner:
    """All jobs of a Hub. Every method is called from the Hub's event loop."""

    def __init__(self, root: Path, tokens: TokenBook, options: JobOptions | None = None) -> None:
        self.folder = root / "jobs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tokens = tokens
        self.options = options or JobOptions()
        self.faults = JobFaults()
        self.jobs: dict[str, Job] = {}
        for folder in sorted(self.folder.iterdir()):
            if (folder / "job.json").exists():
                job = Job.load(folder)
                self.jobs[job.id] = job
        self.network: JobNetwork | None = None
        self.why_plain: str | None = None
        self.port = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: dict[str, tuple[str, str | None]] = {}
        self._changed = asyncio.Condition()
        self._gateways: dict[str, list[Gateway]] = {}
        self.closing = False
        """Set when the Hub was asked to stop: open streams end."""

    def open(self, port: int) -> list[socket.socket]:
        """Make the jobs' network, where that is possible; returns where the Hub, whose port it is, must listen too."""
        self.port = port
        if not self.options.namespaces:
            self.why_plain = "namespaces are switched off"
            return []
        try:
            self.network = JobNetwork()
        except NetworkRefused as error:
            self.why_plain = str(error)
            return []
        return [socket.create_server((self.network.address, port))]

    @property
    def address(self) -> str:
        return self.network.address if self.network else "127.0.0.1"

    def submit(self, namespace: str, owner: str, spec: JobSpec) -> Job:
        job_id = f"{int(time.time()):08x}{secrets.token_hex(8)}"
        folder = self.folder / job_id
        (folder / "tmp").mkdir(parents=True)
        job = Job(job_id, namespace, owner, spec, folder)
        self.jobs[job_id] = job
        job.save()
        self._tasks[job_id] = asyncio.create_task(self._live(job), name=f"job {job_id}")
        return job

    async def end(self, job: Job, stage: str, message: str | None = None) -> None:
        """Ask a job to end in `stage`; returns at once. No effect on one that is over."""
        if job.final:
            return
        self._ending.setdefault(job.id, (stage, message))
        if job.pid is not None and stage == "CANCELED":
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGTERM)
        elif job.pid is not None:
            self._kill(job.pid)
        await self.notify()

    def _kill(self, pid: int) -> None:
        """End a job's first process and everything below it; in namespaces the kernel does the latter."""
        for process in [pid, *(descendants(pid) if self.network is None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    async def expose_again(self, job: Job) -> None:
        """Open the ports that the job's spec exposes now, and no others. A plain process can't get new ports."""
        if job.address is None:
            raise HubError(400, "ports of a job that is not running, or has no network of its own, cannot be changed")
        await self._close_gateways(job)
        await self._open_gateways(job, job.address)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()

    async def close(self) -> None:
        """End every job and remove the network."""
        self.closing = True
        for job in self.jobs.values():
            await self.end(job, "ERROR", "the Hub was stopped")
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=15)
        if self.network:
            self.network.close()

    async def _live(self, job: Job) -> None:
        """A job from its submission to its end."""
        stage, message = "ERROR", None
        try:
            if self.faults.hits(job):
                while job.id not in self._ending:
                    await self.wait_for_change(1.0)
            await self._pause(job, self.options.schedule_s)
            while job.id not in self._ending:
                job.attempt += 1
                stage, message = await self._attempt(job)
                if stage != "ERROR" or job.attempt >= job.spec.attempts or job.id in self._ending:
                    break
                job.add_line(f"===== Attempt {job.attempt} failed ({message}); trying again")
        except (OSError, NetworkRefused) as error:
            stage, message = "ERROR", f"the job could not be started: {error}"
        finally:
            stage, message = self._ending.get(job.id, (stage, message))
            job.stage, job.message, job.finished_at = stage, message, time.time()  # type: ignore[assignment]
            await self._close_gateways(job)
            job.pid = None
            job.expose_urls = []
            await asyncio.to_thread(_remove_scratch, job)
            job.save()
            self._tasks.pop(job.id, None)
            await self.notify()

    async def _pause(self, job: Job, duration_s: float) -> None:
        until = time.monotonic() + duration_s
        while job.id not in self._ending and (left := until - time.monotonic()) > 0:
            await self.wait_for_change(left)

    async def _attempt(self, job: Job) -> tuple[str, str | None]:
        status_read, status_write = os.pipe()
        mode = "namespaces" if self.network else "plain"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bucket_grpo.emulator.jobs_inside",
            str(status_write),
            mode,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=[status_write],
            start_new_session=True,
            limit=1 << 20,
            env=clean_environment(),
        )
        os.close(status_write)
        job.pid = process.pid
        said = await _pipe_reader(status_read)
        address: str | None = None
        logging: asyncio.Task[None] | None = None
        try:
            if await _line(said) != "unshared":
                output, _ = await process.communicate()
                return "ERROR", f"no namespaces for the job: {output.decode(errors='replace').strip()[-300:]}"
            if self.network is None:
                job.plain_home.mkdir(mode=0o700, exist_ok=True)
            else:
                address = self.network.take()
                job.address, job.veth = address, self.network.connect(process.pid)
                self._write_hosts(job)
            targets = await self._open_gateways(job, address)
            assert process.stdin is not None
            process.stdin.write(json.dumps(self._inside(job, targets)).encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
            logging = asyncio.create_task(self._log(job, process))
            word = await self._word_or_end(job, said)
            if word != "started":
                self._kill(process.pid)
                await process.wait()
                return "ERROR", word.removeprefix("failed: ") or "the job's first process died"
            if job.started_at is None:
                job.started_at = time.time()
            job.stage = "RUNNING"
            job.save()
            await self.notify()
            return await self._wait(job, process)
        finally:
            if process.returncode is None:
                self._kill(process.pid)
                await process.wait()
            if logging is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(logging, 2.0)
            await self._close_gateways(job)
            if address and self.network:
                job.address = job.veth = None
                self.network.give_back(address)
                self._write_hosts(job)

    async def _word_or_end(self, job: Job, said: asyncio.StreamReader) -> str:
        """What the first process says of the start; empty if the job is to end before it says anything."""
        word = asyncio.create_task(_line(said))
        while not word.done() and job.id not in self._ending:
            await asyncio.wait({word}, timeout=0.1)
        if word.done():
            return word.result()
        word.cancel()
        return ""

    async def _wait(self, job: Job, process: asyncio.subprocess.Process) -> tuple[str, str | None]:
        assert job.started_at is not None
        deadline = job.started_at + job.spec.timeout_seconds
        exited = asyncio.create_task(process.wait())
        kill_at: float | None = None
        while not exited.done():
            now = time.time()
            if kill_at is None and (job.id in self._ending or now > deadline):
                if now > deadline:
                    self._ending.setdefault(job.id, ("ERROR", "Job timeout"))
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate()
                kill_at = now + self.options.stop_grace_s + self.options.flush_grace_s + 1
            if kill_at is not None and now > kill_at:
                self._kill(process.pid)
            wake_s = min(1.0, max(0.05, (kill_at or deadline) - now))
            await asyncio.wait({exited}, timeout=wake_s)
        code = exited.result()
        if code == 0:
            return "COMPLETED", None
        return "ERROR", f"Job failed with exit code: {code}"

    async def _log(self, job: Job, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        job.add_line(f"===== Job started at {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} =====")
        with (job.folder / "log.txt").open("a") as file:
            while raw := await _long_line(process.stdout):
                line = raw.decode(errors="replace").rstrip("\n")
                job.add_line(line)
                file.write(line + "\n")
                file.flush()
                await self.notify()

    def _inside(self, job: Job, ports: dict[int, int]) -> dict[str, Any]:
        """The line that the first process reads; see `jobs_inside.Inside`."""
        user = self.tokens.user(job.owner)
        assert user is not None
        surroundings = Surroundings(f"http://{self.address}:{self.port}", user.tokens["write"], ports)
        return {
            **surroundings.of(job),
            "mount_options": ["--endpoint", surroundings.endpoint, *self.options.mount_options],
            "folder": str(job.folder),
            "address": f"{job.address}/16" if job.address else None,
            "stop_grace_s": self.options.stop_grace_s,
            "flush_grace_s": self.options.flush_grace_s,
        }

    def _write_hosts(self, job: Job) -> None:
        """Tell every running member of the job's network group, and the job itself, where the members are."""
        members = members_of(job, self.jobs.values())
        text = hosts_text(job, members)
        for reader in {job.id: job, **{member.id: member for member in members}}.values():
            with (reader.folder / "hosts").open("w") as file:  # in place: it is bound into the job's root
                file.write(text)

    async def _open_gateways(self, job: Job, address: str | None) -> dict[int, int]:
        """One gateway for each exposed port; returns exposed port → port that the job must listen on."""
        ports: dict[int, int] = {}
        for port in job.spec.expose.ports:
            gateway = Gateway(
                job.namespace,
                self.tokens,
                port in job.spec.expose.ports_public,
                lambda: self.faults.gateway_cut_after_s,
            )
            ports[port] = port if address else gateway.free_port()
            url = await gateway.open(self.address, address or "127.0.0.1", ports[port])
            self._gateways.setdefault(job.id, []).append(gateway)
            job.expose_urls.append(url)
        return ports

    async def _close_gateways(self, job: Job) -> None:
        job.expose_urls = []
        for gateway in self._gateways.pop(job.id, []):
            await gateway.close()


def _remove_scratch(job: Job) -> None:
    """A machine's disk goes with the job; what stays is its record and its log."""
    for path in (*(job.folder / name for name in ("tmp", "root", "volumes")), job.plain_home):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            print(f"could not remove {path}: {error}", file=sys.stderr, flush=True)


async def _pipe_reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0))
    return reader


async def _line(reader: asyncio.StreamReader) -> str:
    return (await reader.readline()).decode().strip()


async def _long_line(reader: asyncio.StreamReader) -> bytes:
    """The next line, or the next piece of one that is too long to be kept whole."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
