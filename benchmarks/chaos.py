"""Kill parts of a run at random and see whether it ends as if nothing had happened.

    python benchmarks/chaos.py --kills 20 --steps 300 --json

Each kill is a SIGKILL to one of: the training process, the proxy, a replica's agent, a vLLM engine. The next one waits
until the part is back, which is timed. The run must end by itself with every step, every prompt accounted for, and
every sampled answer from the version that the journal names.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from bucket_grpo.cli.demo import DemoOptions, run_demo
from bucket_grpo.report.files import read_json, read_yaml
from bucket_grpo.runtime.guard import descendants
from bucket_grpo.trainer.lineage import Lineage

PARTS = ("training", "proxy", "agent", "engine")
NEEDLES = {
    "training": "bucket_grpo.trainer.train",
    "proxy": "bucket_grpo.proxy",
    "agent": "bucket_grpo.inference",
    "engine": "vllm.entrypoints.openai.api_server",
}
RECOVERY_TIMEOUT_S = 180.0


@dataclass
class Chaos:
    """Kills from a thread of its own while the run goes on in the main one."""

    run_dir: Path
    kills: int
    steps: int
    parts: list[str]
    rng: random.Random
    done: list[dict[str, Any]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        parts = [self.parts[i % len(self.parts)] for i in range(self.kills)]
        self.rng.shuffle(parts)
        # Spread over the run: the last kill still has a good part of it before it.
        at_steps = sorted(self.rng.sample(range(5, max(6 + self.kills, int(self.steps * 0.9))), self.kills))
        for part, at_step in zip(parts, at_steps, strict=True):
            if not self._until(lambda step=at_step: (self._last_step() or 0) >= step, None):
                return
            self._kill(part)

    def _kill(self, part: str) -> None:
        victims = processes(NEEDLES[part])
        if not victims:
            print(f"chaos: no {part} to kill", file=sys.stderr)
            return
        victim = self.rng.choice(victims)
        killed_at, killed_at_clock = time.monotonic(), time.time()
        print(f"chaos: killing {part} ({victim}) at step {self._last_step()}", file=sys.stderr, flush=True)
        os.kill(victim, signal.SIGKILL)
        back = {
            "training": lambda: self._last_row().get("time", 0) > killed_at_clock,
            "proxy": lambda: self._status() is not None,
            "agent": self._all_routable,
            "engine": self._all_routable,
        }[part]
        # A part that was killed is still shown as healthy for a moment.
        self.stopped.wait(1.0 if part in ("agent", "engine") else 0.0)
        recovered = self._until(back, RECOVERY_TIMEOUT_S)
        self.done.append({"part": part, "recovery_s": time.monotonic() - killed_at if recovered else None})

    def _until(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.stopped.is_set() and (deadline is None or time.monotonic() < deadline):
            if condition():
                return True
            self.stopped.wait(0.1)
        return False

    def _last_step(self) -> int | None:
        return self._last_row().get("step")

    def _last_row(self) -> dict[str, Any]:
        try:
            row: dict[str, Any] = json.loads((self.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        except (FileNotFoundError, IndexError, ValueError):
            return {}
        return row

    def _status(self) -> dict[str, Any] | None:
        try:
            status: dict[str, Any] = httpx.get(f"{(self.run_dir / 'proxy.url').read_text()}/status", timeout=2).json()
        except (httpx.HTTPError, ValueError, FileNotFoundError):
            return None
        return status

    def _all_routable(self) -> bool:
        """Every replica takes work again, with the live version READY."""
        status = self._status()
        if status is None or not status["live"]:
            return False
        ready = [r for r in status["replicas"] if r["routable"] and "READY" in r["versions"].values()]
        return len(ready) == len(status["replicas"])


def processes(needle: str) -> list[int]:
    """Our descendants whose module is `needle` (but not the guards that watch over them)."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if needle in arguments and "bucket_grpo.runtime.guard" not in arguments:
            found.append(pid)
    return found


def unaccounted(run_dir: Path) -> int:
    """Prompt groups that were neither trained nor dropped, though later ones were long done.

    What was in flight or queued when the run ended is behind the newest trained group by at most both bounds together.
    """
    run = read_yaml(run_dir / "run.yaml") or {}
    window = (run["max_inflight_tasks"] + run["queue_maxsize"]) // run["num_generations"] + run["num_generations"]
    settled = Lineage.read(run_dir).settled()
    return sum(position not in settled for position in range(max(settled) - window))


def p50(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what may be killed")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    run_dir = (arguments.run_dir or Path("runs") / f"chaos-{datetime.now(UTC):%Y%m%d-%H%M%S}").absolute()
    chaos = Chaos(run_dir, arguments.kills, arguments.steps, arguments.parts, random.Random(arguments.seed))
    thread = threading.Thread(target=chaos.run, name="chaos", daemon=True)
    thread.start()
    options = DemoOptions(
        run_dir=run_dir,
        overrides={"max_steps": arguments.steps, "save_steps": 10},
        max_training_restarts=arguments.kills,
    )
    status = run_demo(options)
    chaos.stopped.set()
    thread.join(10)
    report = read_json(run_dir / "report.json")
    if status or report is None:
        return status or 1
    times = {part: [k["recovery_s"] for k in chaos.done if k["part"] == part] for part in PARTS}
    replica = times["agent"] + times["engine"]
    figures = {
        **report,
        "kills": len(chaos.done),
        "kills_by_part": {part: len(values) for part, values in times.items()},
        "not_recovered": sum(value is None for values in times.values() for value in values),
        "recovery_proxy_s": p50([v for v in times["proxy"] if v is not None]),
        "recovery_replica_s": max([v for v in replica if v is not None], default=None),
        "recovery_trainer_s": max([v for v in times["training"] if v is not None], default=None),
        "groups_unaccounted": unaccounted(run_dir),
    }
    keys = ("kills", "recovery_proxy_s", "recovery_replica_s", "recovery_trainer_s", "groups_unaccounted")
    print(json.dumps(figures) if arguments.json else "\n".join(f"{key:22} {figures[key]}" for key in keys))
    return 0


if __name__ == "__main__":
    sys.exit(main())
