"""`bucket-grpo demo`: the main job on this machine, from an empty bucket to a report, with every part real.

Trainer (TRL + PEFT), proxy, N vLLM replicas with their agents, and one bucket that each of them mounts for itself.
"""

import json
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from bucket_grpo.bucket_sync.current import claim
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.bucket_sync.vocabulary import mint_incarnation
from bucket_grpo.cli.errors import UserError
from bucket_grpo.cli.local import LocalRun, PartFailed
from bucket_grpo.cli.progress import Progress, counted
from bucket_grpo.inference.spec import loras_for
from bucket_grpo.runtime.jsonl import Follower
from bucket_grpo.runtime.processes import Child, free_port
from bucket_grpo.trainer.job import Outcome, TrainerJob
from bucket_grpo.trainer.run_file import RunFile
from bucket_grpo.trainer.tiny_model import resolve_model

REPLICA_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class DemoOptions:
    run_dir: Path
    run_file: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    replicas: int | None = None
    port: int = 0
    profile: str = "hf-mount-2026-09"
    time_scale: float = 1.0
    sync: str = "deferred"
    keep: bool = False
    max_training_restarts: int = 3
    vllm_command: list[str] | None = None
    """What starts vLLM, where it is not the installed one; for tests."""


class Demo:
    """One run of the demo. `run` returns the report; any failure raises `PartFailed` with one clear line."""

    def __init__(self, run_file: RunFile, options: DemoOptions, progress: Progress) -> None:
        self.run_file = run_file
        self.options = options
        self.progress = progress
        self.incarnation = mint_incarnation()
        self.local = LocalRun(options.run_dir, options.profile, options.time_scale)
        self.run_dir = self.local.run_dir
        self.model_path = find_model(run_file.model_name_or_path)
        self.replicas = options.replicas or run_file.jobs.vllm.replicas
        self.agent_urls: list[str] = []

    @property
    def run(self) -> str:
        return self.run_file.run_name

    def start(self) -> Child:
        """Start every part; returns the trainer job's supervisor."""
        self.progress.phase("bucket and mounts")
        self.local.check_disk()
        claim(open_store(self.local.objects), self.run, self.incarnation)
        trainer_mount = self.local.mount("trainer", read_only=False)
        # Of their own: a mount has one flush loop, and a checkpoint in it would hold versions back.
        checkpoints_mount = self.local.mount("checkpoints", read_only=False)
        replica_mounts = [self.local.mount(f"vllm-{i}", read_only=True) for i in range(self.replicas)]
        if not trainer_mount.fuse:
            self.progress.note(
                "FUSE can't be had here: plain folders with the same emulated delays stand in for mounts"
            )
        self.progress.phase(f"{self.replicas} vLLM replicas and the trainer")
        for i, mount in enumerate(replica_mounts):
            self._start_replica(i, mount.path)
        return self._start_trainer(trainer_mount.path, checkpoints_mount.path)

    def watch(self, trainer: Child) -> None:
        """Follow the run until the trainer job ends; raises `PartFailed` if any part ends badly."""
        metrics = Follower(self.run_dir / "metrics.jsonl")
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while trainer.poll() is None:
                for row in metrics.new():
                    self.progress.step(row)
                self.progress.fleet(self._proxy_status(client))
                if not (self.run_dir / "outcome.json").exists():  # a run that is over lets its replicas end themselves
                    for healed in self.local.heal():
                        self.progress.note(healed)
                time.sleep(0.3)
        for row in metrics.new():
            self.progress.step(row)
        outcome = self._outcome()
        if trainer.poll() != 0 or outcome.exit_reason != "finished":
            raise PartFailed(outcome.error or f"the trainer job ended with status {trainer.poll()}")

    def _start_replica(self, index: int, mount: Path) -> None:
        port = free_port()
        spec = {
            "replica": f"vllm-{index}",
            "port": port,
            "model": self.model_path,
            "served_model_name": self.run_file.model_name_or_path,
            "dtype": self.run_file.dtype,
            "run": self.run,
            "bucket": str(mount),
            "staging_dir": str(self.run_dir / "staging" / f"vllm-{index}"),
            "log_dir": str(self.run_dir / "logs"),
            "max_lora_rank": self.run_file.lora_r,
            "max_loras": loras_for(self.run_file.max_staleness),
            "cpu_threads": 1,
            **self.run_file.vllm_spec,
        }
        if self.options.vllm_command:
            spec["vllm_command"] = self.options.vllm_command
        path = self.run_dir / f"vllm-{index}.json"
        path.write_text(json.dumps(spec, indent=1))
        self.local.start_replica(
            f"vllm-{index}", [sys.executable, "-m", "bucket_grpo.inference", "--config", str(path)]
        )
        self.agent_urls.append(f"http://127.0.0.1:{port}")

    def _start_trainer(self, mount: Path, checkpoints: Path) -> Child:
        resolved = self.run_dir / "run.yaml"
        resolved.write_text(self.run_file.dump())
        job = TrainerJob(
            run_file=resolved,
            run=self.run,
            incarnation=self.incarnation,
            run_dir=self.run_dir,
            bucket=str(mount),
            confirm=str(self.local.objects),
            checkpoints=str(checkpoints),
            replicas=self.agent_urls,
            proxy_port=self.options.port,
            sync=self.options.sync,
            max_training_restarts=self.options.max_training_restarts,
            server_timeout_s=REPLICA_START_TIMEOUT_S,
        )
        path = job.write(self.run_dir / "trainer.json")
        self.trainer = self.local.start(
            "supervisor", [sys.executable, "-m", "bucket_grpo.trainer", "--config", str(path)]
        )
        return self.trainer

    def _proxy_status(self, client: httpx.Client) -> dict[str, Any] | None:
        url = self.run_dir / "proxy.url"
        if not url.exists():
            return None
        try:
            return client.get(f"{url.read_text()}/status").json()
        except (httpx.HTTPError, ValueError):
            return None  # starting, or just being restarted: the next look shows it again

    def _outcome(self) -> Outcome:
        path = self.run_dir / "outcome.json"
        if not path.exists():
            return Outcome(exit_reason="died", error="the trainer job left no outcome.json")
        return Outcome.model_validate_json(path.read_text())

    def stop(self) -> None:
        if hasattr(self, "trainer"):
            self.trainer.stop(30)
        self.local.stop()
        if not self.options.keep:
            for scratch in ("staging", "trl", "mounts", "spool", "restored"):
                shutil.rmtree(self.run_dir / scratch, ignore_errors=True)


def find_model(name: str) -> str:
    """Where the base model is: a folder, or a Hub id of which at least the config can be had."""
    try:
        model = resolve_model(name)
        if not Path(model).is_dir():
            hf_hub_download(model, "config.json", etag_timeout=10)
    except (ValueError, OSError, HfHubHTTPError, httpx.HTTPError) as error:
        raise UserError(f"model_name_or_path: {name} cannot be had: {str(error).strip().splitlines()[0]}") from error
    return model


def check_port(port: int) -> None:
    """Refuse a taken port before anything is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PartFailed(
                f"port {port} on 127.0.0.1 is in use ({error.strerror}): choose another --port, or 0 for any free one"
            ) from error


def run_demo(options: DemoOptions, *, as_json: bool = False) -> int:
    """Run the demo from start to report; the exit status: 0, 1 (failed, one line says why) or 130 (Ctrl-C)."""
    from bucket_grpo.report.build import build_report
    from bucket_grpo.trainer.audit import audit_folder

    check_port(options.port)
    if (options.run_dir / "run.yaml").exists():
        raise UserError(f"{options.run_dir} holds a run already: choose another --run-dir")
    run_file = RunFile.load(options.run_file or recipe("tiny-addition"), options.overrides)
    progress = Progress(run_file.max_steps, to_stderr=as_json)
    demo = Demo(run_file, options, progress)
    # Ctrl-C ends the run also where a shell started us in the background, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A terminal that closes, or a plain kill, must clean up as Ctrl-C does.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: sys.exit(128 + number))
    try:
        try:
            demo.watch(demo.start())
        finally:
            demo.stop()
        progress.phase("audit: who really answered")
        with counted("auditing") as tell:
            audit_folder(demo.run_dir, on_progress=tell)
        report = build_report(demo.run_dir)
    except KeyboardInterrupt:
        progress.fail("stopped; nothing is left running")
        return 130
    except PartFailed as error:
        progress.fail(str(error))
        return 1
    progress.table(report)
    progress.note(f"report, metrics and plot: {demo.run_dir}")
    if as_json:
        print(json.dumps(report))
    return 0


def recipe(name: str) -> Path:
    return Path(__file__).parent.parent / "recipes" / f"{name}.yaml"
