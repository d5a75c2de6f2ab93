"""`python -m bucket_grpo.jobs.inside replica|trainer|launcher …`: what a job runs, once it has the package.

Everything that it needs to know lies in the bucket, which is mounted at `--mount`; scratch files go to local disk.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from bucket_grpo.bucket_sync.store_contract import StoreError
from bucket_grpo.bucket_sync.stores import open_store
from bucket_grpo.jobs.hub import HubProblem
from bucket_grpo.jobs.launch import LaunchFailed
from bucket_grpo.jobs.log_copy import LogCopy
from bucket_grpo.jobs.plan import Plan
from bucket_grpo.jobs.travel import read_plan

LOG_EVERY_S = 0.5


def scratch_folder(plan: Plan, part: str) -> Path:
    return Path(tempfile.gettempdir()) / "bucket-grpo" / plan.incarnation / part


def run_replica(plan: Plan, part: str, mount: Path, port: int) -> int:
    """Run the agent, which supervises vLLM and ends the job when the run is over, and show vLLM's log as ours."""
    scratch = scratch_folder(plan, part)
    scratch.mkdir(parents=True, exist_ok=True)
    # The emulated Hub has no GPUs, whatever the flavor's name says.
    spec = plan.agent_spec(part, mount, port, scratch, gpu=Path("/dev/nvidiactl").exists())
    if plan.needs.model.startswith("builtin:"):
        from bucket_grpo.trainer.tiny_model import resolve_model

        spec["model"] = resolve_model(plan.needs.model)
    config = scratch / "agent.json"
    config.write_text(json.dumps(spec, indent=1))
    agent = subprocess.Popen([sys.executable, "-m", "bucket_grpo.inference", "--config", str(config)])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.terminate())
    log = LogCopy()
    while True:
        try:
            status = agent.wait(LOG_EVERY_S)
        except subprocess.TimeoutExpired:
            log.copy(sorted((scratch / "logs").glob("*.log")))
            continue
        log.copy(sorted((scratch / "logs").glob("*.log")))
        return status if status >= 0 else 128 - status


def run_trainer(plan: Plan, mount: Path, port: int) -> int:
    from bucket_grpo.jobs.steward import Steward

    return Steward(plan, mount, scratch_folder(plan, "trainer"), port).run()


def run_launcher(plan: Plan) -> int:
    """Start the plan as a new incarnation; the exit status is 1 if the run is running already."""
    from bucket_grpo.jobs.actions import Found, start_again

    _, status = start_again(Found.of(plan), wait="posted", say=lambda line: print(line, flush=True))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bucket_grpo.jobs.inside", description=__doc__)
    parser.add_argument("role", choices=["replica", "trainer", "launcher"])
    parser.add_argument("--mount", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--part", required=True)
    arguments = parser.parse_args()
    try:
        plan = read_plan(open_store(arguments.mount), arguments.run, arguments.incarnation)
        if arguments.role == "replica":
            return run_replica(plan, arguments.part, arguments.mount, arguments.port)
        if arguments.role == "launcher":
            return run_launcher(plan)
        return run_trainer(plan, arguments.mount, arguments.port)
    except (StoreError, HubProblem, LaunchFailed, ValueError, OSError) as error:
        print(f"bucket-grpo {arguments.part}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
