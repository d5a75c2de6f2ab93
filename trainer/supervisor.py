"""The trainer job's first process: it holds the proxy's listening socket and starts proxy and training.

The proxy may die at any time: it is started again on the same socket, so connections that arrive meanwhile wait in
the kernel's queue instead of being refused. The training process ends the job: its exit status is ours.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from bucket_grpo.bucket_sync.current import Superseded, claim
from bucket_grpo.bucket_sync.stores import StoreError, open_store
from bucket_grpo.bucket_sync.vocabulary import later_incarnation
from bucket_grpo.runtime.processes import Child, end_with_parent, spawn
from bucket_grpo.trainer.job import Outcome, TrainerJob
from bucket_grpo.trainer.run_file import RunFile

POLL_S = 0.1
TERMINATION_GRACE_S = 25.0
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
HEALTHY_AFTER_S = 30.0


class Supervisor:
    """Runs one trainer job to its end."""

    def __init__(self, job: TrainerJob, job_path: Path) -> None:
        self.job = job
        self.job_path = job_path
        self.logs = job.run_dir / "logs"
        self.outcome = job.run_dir / "outcome.json"
        self.asked_to_stop = False
        self.proxy_restarts = 0
        self.training_restarts = 0

    def run(self) -> int:
        end_with_parent(signal.SIGTERM)
        self.outcome.unlink(missing_ok=True)  # of an earlier run in this folder
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.job.proxy_host, self.job.proxy_port))
            except OSError as error:
                return self._fail(
                    f"the proxy cannot listen on {self.job.proxy_host}:{self.job.proxy_port}: {error.strerror}. "
                    "Another process has the port: stop it, or choose another proxy_port."
                )
            listener.listen(1024)
            self.proxy = self._start_proxy(listener)
            self.training = self._start_training(listener)
            try:
                return self._watch(listener)
            finally:
                self.training.stop(grace_s=2)
                self.proxy.stop(grace_s=5)

    def _watch(self, listener: socket.socket) -> int:
        stop_by: float | None = None
        while True:
            status = self.training.poll()
            if status is not None:
                if self._may_resume(status):
                    failure = self._resume(listener, -status)
                    if failure:
                        return self._fail(failure)
                    continue
                self._check_outcome(self.training, status)
                return status if status >= 0 else 128 - status
            if self.asked_to_stop and stop_by is None:
                self.training.terminate()
                stop_by = time.monotonic() + TERMINATION_GRACE_S
            if stop_by is not None and time.monotonic() > stop_by:
                return self._fail(f"training did not stop within {TERMINATION_GRACE_S:.0f} s of SIGTERM", "terminated")
            if self.proxy.poll() is not None and not self.asked_to_stop:
                failure = self._restart_proxy(listener)
                if failure:
                    return self._fail(failure)
            time.sleep(POLL_S)

    def _may_resume(self, status: int) -> bool:
        """A process that was killed may have been in the way of something else; one that failed would fail again."""
        killed = status < 0 and not self.outcome.exists() and not self.asked_to_stop
        return killed and self.training_restarts < self.job.max_training_restarts

    def _resume(self, listener: socket.socket, signum: int) -> str | None:
        """Start killed training again from its newest checkpoint, as a new incarnation with its own proxy.

        Returns why that can't be done, if it can't.
        """
        self.training_restarts += 1
        incarnation = later_incarnation(self.job.incarnation)
        print(f"training was ended by signal {signum}; resuming as incarnation {incarnation}", flush=True)
        self.training.stop(grace_s=0)  # what is left of its process group: TRL's rollout worker
        self.proxy.stop(grace_s=5)
        try:
            claim(open_store(self.job.bucket, confirm=self.job.confirm), self.job.run, incarnation)
        except (StoreError, Superseded) as error:
            return f"training was ended by signal {signum} and can't be resumed: {error}"
        self.job = self.job.model_copy(update={"incarnation": incarnation, "resume": True, "resume_from": None})
        self.job.write(self.job_path)
        self.proxy = self._start_proxy(listener)
        self.training = self._start_training(listener)
        return None

    def _restart_proxy(self, listener: socket.socket) -> str | None:
        """Start the proxy again; the reason for giving up, if it dies too often."""
        died = self.proxy
        lived_s = time.monotonic() - died.started_at
        self.proxy_restarts += 1
        if self.proxy_restarts > self.job.max_proxy_restarts:
            return f"the proxy died {self.proxy_restarts} times; the last lines of its log:\n{died.tail(8)}"
        # An exit status of its own (bad config, a bug at import) repeats at once: do not hide it behind restarts.
        if died.poll() in (1, 2, 3) and lived_s < 3:
            return f"the proxy cannot start (exit status {died.poll()}):\n{died.tail(8)}"
        step = 0 if lived_s > HEALTHY_AFTER_S else min(self.proxy_restarts - 1, len(BACKOFF_S) - 1)
        print(f"proxy ended with status {died.poll()} after {lived_s:.0f} s; starting it again", flush=True)
        time.sleep(BACKOFF_S[step])
        self.proxy = self._start_proxy(listener)
        return None

    def _start_proxy(self, listener: socket.socket) -> Child:
        config = write_proxy_config(self.job)
        return spawn(
            [sys.executable, "-m", "bucket_grpo.proxy", "--config", str(config), "--fd", str(listener.fileno())],
            name="proxy",
            log_path=self.logs / "proxy.log",
            pass_fds=[listener.fileno()],
        )

    def _start_training(self, listener: socket.socket) -> Child:
        command = [sys.executable, "-m", "bucket_grpo.trainer.train", "--config", str(self.job_path)]
        url = f"http://{self.job.proxy_host}:{listener.getsockname()[1]}"
        (self.job.run_dir / "proxy.url").write_text(url)
        return spawn(
            [*command, "--proxy-url", url],
            name="training",
            log_path=self.logs / "trainer.log",
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def _check_outcome(self, training: Child, status: int) -> None:
        """A process that was killed, or died in a library, leaves no outcome: write one with its last words."""
        if not self.outcome.exists():
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            lines = [line for line in training.tail(30).splitlines() if line.strip()]
            last = lines[-1] if lines else "it left no log"
            Outcome(exit_reason="died", error=f"the training process ended with {how}: {last}").write(self.job.run_dir)

    def _fail(self, message: str, reason: str = "error") -> int:
        print(message, file=sys.stderr, flush=True)
        if not self.outcome.exists():
            Outcome(exit_reason=reason, error=message).write(self.job.run_dir)
        return 1

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked_to_stop = True


def write_proxy_config(job: TrainerJob) -> Path:
    """`proxy.json` in the run folder: what the job and its run file say about the proxy."""
    run = RunFile.load(job.run_file)
    config = {
        "host": job.proxy_host,
        "port": job.proxy_port,
        "run": job.run,
        "incarnation": job.incarnation,
        "base_model": run.model_name_or_path,
        "dtype": run.dtype,
        "replicas": job.replicas,
        "journal_dir": str(job.run_dir / "journal"),
        "journal_sample_frac": job.journal_sample_frac,
        # Parking and retrying end before TRL gives a request up.
        "request_timeout_s": 0.95 * run.request_timeout,
        "park_timeout_s": min(90.0, 0.25 * run.request_timeout),
        "bucket": job.bucket if job.sync == "blocking" else None,
        "confirm": job.confirm if job.sync == "blocking" else None,
    }
    path = job.run_dir / "proxy.json"
    path.write_text(json.dumps(config, indent=1))
    return path
