"""Run folders as a run leaves them, small and with known figures."""

import json
from pathlib import Path
from typing import Any

INCARNATION = "20261130t154500z-a1b2c3"


def metrics_rows(steps: int) -> list[dict[str, Any]]:
    """Step n has reward n/100; every 4 steps a publish stalls for 0.02 s (before step 1: 5); step 8 drops 10."""
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {
            "step": step, "time": 1000.0 + step,
            "reward": step / 100, "rewards/exact": step / 100, "rewards/short": 1.0,
            "perf/fwd_bwd_s": 0.3, "perf/rollout_wait_s": 0.05, "sample/rollout_queue_size": 100.0,
            "sample/staleness_mean": 1.0 + step % 2, "sample/staleness_max": 3.0, "batch/samples_per_step": 64.0,
            "completions/clipped_ratio": 0.0, "bucket_grpo/lag": float(step % 4 == 1),
            "bucket_grpo/live_version": float(1 + (step - 1) // 4), "rollout/generated_tok_s": 900.0,
        }  # fmt: skip
        if step > 1:
            row["perf/step_s"] = 0.4
        if step == 1:
            row["bucket_grpo/stall_s"] = 5.0
        elif step % 4 == 0:
            row["bucket_grpo/stall_s"] = 0.02
        if step == 8:
            row["sample/dropped_stale_total"] = 10.0
        rows.append(row)
    return rows


def journal_entry(i: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"r{i}", "t": 1000.0 + i / 10,
        "requested": "trl-policy-v1", "served": f"tiny-{INCARNATION}-v1", "number": 1,
        "replica": "vllm-0", "route": "cold" if i % 8 == 0 else "affinity", "retries": 0, "late": False, "status": 200,
        "completion_tokens": 5, "prompt_tokens": 9, "latency_s": 0.1, "finish_reason": "stop", **changes,
    }  # fmt: skip


def write_run(folder: Path, *, steps: int = 100) -> Path:
    """A finished run with every file."""
    (folder / "journal").mkdir(parents=True)
    (folder / "run.yaml").write_text("run_name: tiny\nseed: 3\nbucket: hf://buckets/me/rl\n")
    write_lines(folder / "metrics.jsonl", metrics_rows(steps))
    write_lines(folder / "journal" / "journal-7-20261130t154500z.jsonl", [journal_entry(i) for i in range(801)])
    replica = {"loads": 26, "load_retries": 1, "load_failures": 0, "engine_restarts": 0}
    routing = {
        "requests": 801,
        "affinity": 700,
        "cold": 101,
        "spilled": 0,
        "parked": 2,
        "retried": 1,
        "late": 0,
        "failed": 0,
    }
    documents: dict[str, dict[str, Any]] = {
        "outcome.json": {
            "exit_reason": "finished", "seed": 3, "wall_clock_s": 42.0, "time_to_first_step_s": 1.5,
            "versions": {"trl": "1.16.0"}, "adapter": f"tiny/{INCARNATION}/v000026.safetensors",
        },
        "publisher.json": {"publishes": 26, "skipped": 0, "publish_to_live_s": [3.0, 1.0, 2.0], "lag_max": 1},
        "proxy_status.json": {"run": "tiny", "replicas": [replica, replica], "routing": routing | {"failed": 0}},
        "audit.json": {
            "audited_samples": 48, "wrong_policy_samples": 0, "max_abs_logprob_diff": 3e-6, "power_frac": 0.96,
        },
    }  # fmt: skip
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
