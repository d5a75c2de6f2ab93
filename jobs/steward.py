"""The trainer job's first process: everything about the run that is neither training nor serving.

It finds the replicas and tells the proxy, starts lost ones again, says in the bucket how the run stands, ends the run
when its budget is spent, takes its results to the bucket, and ends the replicas. So the launching machine may be
switched off at any time after the launch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import httpx

from bucket_grpo.bucket_sync.checkpoints import CheckpointRejected
from bucket_grpo.bucket_sync.current import Superseded
from bucket_grpo.bucket_sync.store_contract import StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.jobs.budget import BudgetWatch
from bucket_grpo.jobs.checkpoint_carrier import CheckpointCarrier, bring_back
from bucket_grpo.jobs.fleet import FleetWatch
from bucket_grpo.jobs.hardware import EXPOSED_USD_PER_HOUR
from bucket_grpo.jobs.hub import HubProblem, JobsHub, running_usd
from bucket_grpo.jobs.labels import VLLM
from bucket_grpo.jobs.launch import cancel_jobs, close_run, secrets_for
from bucket_grpo.jobs.log_copy import LogCopy
from bucket_grpo.jobs.plan import Cost, Plan
from bucket_grpo.jobs.settings import seconds
from bucket_grpo.jobs.travel import read_plan, unpack
from bucket_grpo.jobs.watch import status_key
from bucket_grpo.runtime.jsonl import Follower
from bucket_grpo.runtime.processes import Child, spawn

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

POLL_S = 1.0
LOOK_S = 10.0
STATUS_S = 15.0
STOP_GRACE_S = 40.0
BUDGET_STATUS = 4
SUMMARY = ("reward", "step", "sample/staleness_mean", "perf/step_s", "rollout/generated_tok_s")
RESULT_PATTERNS = ("*.json", "*.jsonl", "run.yaml", "journal/*.jsonl", "logs/*.log")


class Steward:
    """One incarnation, from inside its trainer job.

    Args:
        mount: the bucket, as this job sees it.
        scratch: local disk for everything that the training leaves.
        port: for a user's own script, the port where the proxy is.
    """

    def __init__(self, plan: Plan, mount: Path, scratch: Path, port: int) -> None:
        self.plan = plan
        self.mount = mount
        self.run_dir = scratch
        self.port = port
        self.hub = JobsHub(plan.namespace)
        # The Hub's API, not the mount: a pointer that is written every few seconds would hold versions back there.
        self.store = open_store(plan.needs.bucket)
        self.prices = self.hub.prices()
        self.cost = Cost.of(plan, self.prices)
        self.fleet = FleetWatch(plan)
        self.budget = BudgetWatch(plan.needs.budget, self.cost.usd_per_hour)
        self.metrics = Follower(self.run_dir / "metrics.jsonl")
        # Our own training takes its checkpoints up itself; a plain script only leaves them on disk.
        self.carrier = (
            CheckpointCarrier(self.store, plan.run, plan.incarnation, scratch / "trl") if plan.script else None
        )
        self._logs = [scratch / "logs" / name for name in ("supervisor.log", "trainer.log")]
        self.last: dict[str, Any] = {}
        self.urls: list[str] = []
        self.usd = 0.0
        self.why: str | None = None
        self.asked_to_stop = False

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        status = 1
        try:
            run_file = unpack(self.store, self.plan, self.run_dir)
            if self._wait_for_replica():
                status = self._train(run_file)
        except (HubProblem, StoreError, CheckpointRejected, Superseded, ValueError, OSError) as error:
            self.why = str(error)
            print(f"bucket-grpo trainer: {error}", file=sys.stderr, flush=True)
        finally:
            self._finish(status)
        return status

    def _wait_for_replica(self) -> bool:
        """True once a replica has a machine. Raises `HubProblem` when none has one in time."""
        limit_s = seconds(self.plan.needs.jobs.schedule_timeout)
        deadline = time.monotonic() + limit_s
        while not self.asked_to_stop:
            self._keep_house()
            if self.urls:
                print(f"first replica: {self.urls[0]}", flush=True)
                return True
            if time.monotonic() > deadline:
                raise HubProblem(f"no replica got a machine within {limit_s} s: try another flavor")
            time.sleep(POLL_S)
        self.why = "the job was asked to stop before a replica was there"
        return False

    def _train(self, run_file: Path) -> int:
        """Start the training and keep house until it ends; its exit status."""
        config = self._write_job(run_file)
        command = [sys.executable, "-m", "bucket_grpo.trainer", "--config", str(config)]
        if self.plan.script is not None:
            script = self.run_dir / "files" / self.plan.files[self.plan.script]
            command[2:3] = ["bucket_grpo.jobs.script_trainer", "--script", str(script)]
        training = spawn(
            command,
            name="trainer",
            log_path=self.run_dir / "logs" / "supervisor.log",
            # A progress bar is one endless line in a job's log.
            env={**os.environ, "TQDM_DISABLE": "1"},
        )
        log = LogCopy()
        next_look = next_status = 0.0
        stop_by: float | None = None
        while training.poll() is None:
            now = time.monotonic()
            log.copy(self._logs)
            self._read_metrics()
            if now >= next_look:
                next_look = now + LOOK_S
                self._keep_house()
            if now >= next_status:
                next_status = now + STATUS_S
                self._say_status("running")
            reason = self.why or self.budget.why_stop(now, self.usd, self.last.get("step"))
            if (reason or self.asked_to_stop) and stop_by is None:
                self.why = reason or "the job was asked to stop"
                print(f"ending the run: {self.why}", flush=True)
                training.terminate()
                stop_by = now + STOP_GRACE_S
            if stop_by is not None and now > stop_by:
                break
            time.sleep(POLL_S)
        return self._training_ended(training, log)

    def _training_ended(self, training: Child, log: LogCopy) -> int:
        status = training.stop(5)
        log.copy(self._logs)
        self._read_metrics()
        if self.why is not None and not self.asked_to_stop:
            return BUDGET_STATUS
        return status if status >= 0 else 128 - status

    def _read_metrics(self) -> None:
        for row in self.metrics.new():
            self.last |= row
            if "reward" in row:
                print(f"step {row['step']} of {self.plan.needs.max_steps}: reward {row['reward']:.4f}", flush=True)

    def _write_job(self, run_file: Path) -> Path:
        from bucket_grpo.trainer.job import TrainerJob

        return TrainerJob(
            run_file=run_file,
            run=self.plan.run,
            incarnation=self.plan.incarnation,
            run_dir=self.run_dir,
            bucket=str(self.mount),
            confirm=self.plan.needs.bucket,
            # Through the Hub's API: in the mount they would hold versions back.
            checkpoints=self.plan.needs.bucket,
            replicas=self.urls,
            # TRL's own scripts look for a server at localhost:8000, and load their adapters by path.
            proxy_port=0 if self.plan.script is None else self.port,
            sync="deferred" if self.plan.script is None else "blocking",
            resume_from=self._checkpoint(),
            server_timeout_s=seconds(self.plan.needs.jobs.schedule_timeout) + 600,
        ).write(self.run_dir / "trainer.json")

    def _checkpoint(self) -> Path | None:
        """Where training goes on from, for a resumed run."""
        if self.plan.resumes is None:
            return None
        return bring_back(self.store, self.plan.run, self.run_dir / "resumed-from")

    def _keep_house(self) -> None:
        """One look at the fleet. A Hub that does not answer now is asked again at the next look."""
        if self.carrier is not None:
            self.carrier.look()
        try:
            self._look()
        except (HubProblem, StoreError) as error:
            print(f"fleet not seen this time: {error}", file=sys.stderr, flush=True)
        self._tell_proxy()

    def _look(self) -> None:
        self.plan = read_plan(self.store, self.plan.run, self.plan.incarnation)  # `scale` changes it
        self.fleet.plan = self.plan
        jobs = self.hub.jobs(run=self.plan.run, incarnation=self.plan.incarnation)
        self.usd = self._spent(jobs)
        self.urls = self.fleet.urls(jobs)
        self._start_again(jobs)

    def _spent(self, jobs: Sequence["JobInfo"]) -> float:
        return running_usd(jobs, self.prices, EXPOSED_USD_PER_HOUR)

    def _start_again(self, jobs: Sequence["JobInfo"]) -> None:
        again = self.fleet.lost(jobs)
        if not again:
            return
        secrets = secrets_for(self.plan, self.hub.token, os.environ)
        for index in again:
            job = self.hub.post(self.plan.replica(index), secrets)
            print(f"vllm-{index} was lost; job {job.id} takes its place", flush=True)

    def _tell_proxy(self) -> None:
        """Give the proxy the replicas, if it knows others: they changed, or training was resumed with a new proxy."""
        url = self.run_dir / "proxy.url"
        if not self.urls or not url.exists():
            return
        try:
            with httpx.Client(base_url=url.read_text(), timeout=5, trust_env=False) as proxy:
                if proxy.get("/replicas").raise_for_status().json()["urls"] != self.urls:
                    proxy.put("/replicas", json={"urls": self.urls}).raise_for_status()
        except httpx.HTTPError as error:
            print(f"the proxy was not told of {len(self.urls)} replicas: {error}", file=sys.stderr, flush=True)

    def _say_status(self, state: str) -> None:
        said = {
            "state": state,
            "why": self.why,
            "at": time.time(),
            "usd": round(self.usd, 4),
            "replicas": len(self.urls),
            "given_up": sorted(self.fleet.given_up),
            **{key: self.last.get(key) for key in SUMMARY},
            **self._versions(),
        }
        key = status_key(self.plan.run, self.plan.incarnation)
        try:
            self.store.write_pointer(key, json.dumps(said).encode())
        except StoreError as error:
            print(f"status not written: {error}", file=sys.stderr, flush=True)

    def _versions(self) -> dict[str, Any]:
        url = self.run_dir / "proxy.url"
        if not url.exists():
            return {"live": None, "accepted": None}
        try:
            status = httpx.get(f"{url.read_text()}/status", timeout=3, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return {"live": None, "accepted": None}  # starting, restarting, or gone with the training
        return {"live": status.get("live"), "accepted": status.get("accepted")}

    def _finish(self, status: int) -> None:
        """End the replicas first: they cost the most. Then checkpoint and results, then the last word."""
        try:
            labels = {"run": self.plan.run, "incarnation": self.plan.incarnation, "role": VLLM}
            ended = cancel_jobs(self.hub, **labels)
            print(f"ended {', '.join(ended) or 'no replica: none was active'}", flush=True)
            self.usd = self._spent(self.hub.jobs(run=self.plan.run, incarnation=self.plan.incarnation))
        except HubProblem as error:
            print(f"replicas not cancelled ({error}): they end by the run's state", file=sys.stderr, flush=True)
        if self.carrier is not None:
            self.carrier.look(ended=True)
            print(f"checkpoints in the bucket: steps {self.carrier.close() or 'none'}", flush=True)
        try:
            close_run(self.store, self.plan.run, self.plan.incarnation)
            self._complete_outcome()
            self._upload_results()
        except (StoreError, Superseded, OSError) as error:
            print(f"results not complete in the bucket: {error}", file=sys.stderr, flush=True)
        self._say_status("finished" if status == 0 else "failed")
        if self.why:
            alert(self.plan.needs.budget.alert, {"run": self.plan.run, "why": self.why, "usd": round(self.usd, 4)})

    def _complete_outcome(self) -> None:
        """Add to `outcome.json` what training can't know: the cost, and why a run that we ended was ended."""
        path = self.run_dir / "outcome.json"
        outcome = json.loads(path.read_text()) if path.exists() else {"exit_reason": "died"}
        outcome["cost_usd"] = round(self.usd, 4)
        if self.why is not None and outcome["exit_reason"] in ("terminated", "died"):
            outcome |= {"exit_reason": self.why.partition(":")[0].replace(" ", "_"), "error": self.why}
        path.write_text(json.dumps(outcome, indent=1))

    def _upload_results(self) -> None:
        for path in result_files(self.run_dir):
            key = f"{self.plan.run}/{self.plan.incarnation}/results/{path.relative_to(self.run_dir).as_posix()}"
            data = path.read_bytes()
            if data:
                self.store.write_once(key, data)

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked_to_stop = True


def result_files(run_dir: Path) -> list[Path]:
    return sorted({path for pattern in RESULT_PATTERNS for path in run_dir.glob(pattern) if path.is_file()})


def alert(target: str | None, what: dict[str, Any]) -> None:
    """Tell a webhook, or a command on its stdin; a failure to do so is said in the log and changes nothing."""
    if not target:
        return
    try:
        if target.startswith(("http://", "https://")):
            httpx.post(target, json=what, timeout=10).raise_for_status()
        else:
            subprocess.run(target, shell=True, input=json.dumps(what), text=True, timeout=30, check=True)
    except (httpx.HTTPError, subprocess.SubprocessError, OSError) as error:
        print(f"alert not delivered: {error}", file=sys.stderr, flush=True)
