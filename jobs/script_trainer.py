"""`python -m bucket_grpo.jobs.script_trainer --config trainer.json --script train.py`: a user's own TRL script.

The script is not changed: it talks to the proxy where it would talk to vLLM, at `http://localhost:<port>`. It publishes
as TRL does, by path, and the proxy carries each version to the replicas before it answers.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import httpx

from bucket_grpo.bucket_sync.current import Superseded
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.runtime.processes import Child, end_with_parent, spawn
from bucket_grpo.trainer.heartbeat import Heartbeat
from bucket_grpo.trainer.job import Outcome, TrainerJob
from bucket_grpo.trainer.supervisor import write_proxy_config

POLL_S = 0.5
PROXY_START_S = 60.0
STOP_GRACE_S = 25.0


def start_proxy(job: TrainerJob) -> Child:
    """The proxy, answering. Raises `RuntimeError` with its last words if it does not start."""
    config = write_proxy_config(job)
    proxy = spawn(
        [sys.executable, "-m", "bucket_grpo.proxy", "--config", str(config)],
        name="proxy",
        log_path=job.run_dir / "logs" / "proxy.log",
        env=dict(os.environ),
    )
    url = f"http://127.0.0.1:{job.proxy_port}"
    deadline = time.monotonic() + PROXY_START_S
    while time.monotonic() < deadline and proxy.poll() is None:
        try:
            httpx.get(f"{url}/status", timeout=2)
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        (job.run_dir / "proxy.url").write_text(url)
        return proxy
    raise RuntimeError(f"the proxy did not start:\n{proxy.tail(8)}")


def run(job: TrainerJob, script: Path) -> int:
    """Run the script to its end; its exit status. `outcome.json` says how it ended."""
    heartbeat = Heartbeat(open_store(job.bucket, confirm=job.confirm), job.run, job.incarnation)
    proxy = start_proxy(job)
    training = spawn(
        [sys.executable, str(script)],
        name="script",
        log_path=job.run_dir / "logs" / "trainer.log",
        env=dict(os.environ),
        cwd=script.parent,
    )
    asked = False

    def ask(_signum: int, _frame: object) -> None:
        nonlocal asked
        asked = True

    signal.signal(signal.SIGTERM, ask)
    try:
        while training.poll() is None:
            if heartbeat.superseded:
                raise Superseded(heartbeat.superseded)
            if proxy.poll() is not None:
                raise RuntimeError(f"the proxy ended with status {proxy.poll()}:\n{proxy.tail(8)}")
            if asked:
                training.stop(STOP_GRACE_S)
            time.sleep(POLL_S)
    finally:
        status = training.stop(5)
        proxy.stop(5)
        reason = "terminated" if asked else "finished" if status == 0 else "error"
        error = None if status == 0 else f"the script ended with status {status}"
        Outcome(exit_reason=reason, error=error).write(job.run_dir)
        heartbeat.stop("finished" if status == 0 else "failed")
    return status if status >= 0 else 128 - status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.jobs.script_trainer", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--script", type=Path, required=True)
    arguments = parser.parse_args()
    end_with_parent(signal.SIGTERM)
    try:
        return run(TrainerJob.read(arguments.config), arguments.script)
    except (Superseded, RuntimeError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
