"""From the files that a run left to its figures.

`gather` does the reading, `compose` is pure. Each figure has one owner: the training loop for times, samples and
rewards (`metrics.jsonl`), the publisher for versions (`publisher.json`), the proxy for replicas and routing
(`proxy_status.json`, the journal), the audit for trust (`audit.json`), the process itself for its end (`outcome.json`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bucket_grpo.report.files import read_json, read_yaml
from bucket_grpo.report.journal import JournalTotals, journal_totals
from bucket_grpo.report.metrics import (
    Row,
    column,
    first_steps,
    last_steps,
    mean,
    median,
    read_metrics,
    total,
    weighted_mean,
)
from bucket_grpo.report.schema import Evaluation, Groups, Report, Routing

SAMPLES = "batch/samples_per_step"


@dataclass(frozen=True)
class RunFiles:
    """What was found in a run's folder; an empty mapping or None stands for a file that is not there."""

    name: str
    run_file: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    publisher: dict[str, Any] = field(default_factory=dict)
    proxy: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] = field(default_factory=dict)
    journal: JournalTotals | None = None


def gather(run_dir: Path) -> RunFiles:
    """Read the run's folder. Raises `FileNotFoundError` if there is no such folder, `BrokenFile` for a corrupt file."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run in {run_dir}: name the run's folder, such as runs/<run_name>")
    return RunFiles(
        name=run_dir.resolve().name,
        run_file=read_yaml(run_dir / "run.yaml") or {},
        outcome=read_json(run_dir / "outcome.json") or {},
        rows=read_metrics(run_dir / "metrics.jsonl"),
        publisher=read_json(run_dir / "publisher.json") or {},
        proxy=read_json(run_dir / "proxy_status.json") or {},
        audit=read_json(run_dir / "audit.json") or {},
        journal=journal_totals(run_dir / "journal"),
    )


def compose(files: RunFiles) -> Report:
    rows, outcome, publisher, proxy, audit, journal = (
        files.rows, files.outcome, files.publisher, files.proxy, files.audit, files.journal
    )  # fmt: skip
    stalls = stall_seconds(files)
    samples = total(column(rows, SAMPLES))
    last20 = last_steps(rows)
    return Report(
        run=files.run_file.get("run_name") or proxy.get("run") or files.name,
        variant=outcome.get("variant"),
        exit_reason=outcome.get("exit_reason"),
        seed=_first(outcome.get("seed"), files.run_file.get("seed")),
        versions=outcome.get("versions") or {},
        steps=rows[-1]["step"] if rows else outcome.get("steps"),
        wall_clock_s=outcome.get("wall_clock_s"),
        time_to_first_step_s=outcome.get("time_to_first_step_s"),
        step_s_p50=median(column(rows, "perf/step_s")),
        fwd_bwd_s_p50=median(column(rows, "perf/fwd_bwd_s")),
        stall_s_p50=median(stalls),
        stall_s_total=total(stalls),
        rollout_wait_s_total=total(column(rows, "perf/rollout_wait_s")),
        publish_to_live_s_p50=median(publisher.get("publish_to_live_s") or []),
        queue_mean=mean(column(rows, "sample/rollout_queue_size")),
        staleness_mean=weighted_mean(rows, "sample/staleness_mean", SAMPLES),
        staleness_max=max(column(rows, "sample/staleness_max"), default=None),
        dropped_stale_frac=_dropped_stale_frac(rows, samples),
        lag_max=_first(publisher.get("lag_max"), proxy.get("lag_max"), _largest(column(rows, "bucket_grpo/lag"))),
        reward_first20=mean(column(first_steps(rows), "reward")),
        reward_last20=mean(column(last20, "reward")),
        rewards=_rewards(last20),
        zero_std_frac=mean(column(rows, "bucket_grpo/zero_std_frac")),
        clipped_frac=mean(column(rows, "completions/clipped_ratio")),
        abs_log_ratio_mean=weighted_mean(rows, "bucket_grpo/abs_log_ratio_mean", SAMPLES),
        abs_log_ratio_max=max(column(rows, "bucket_grpo/abs_log_ratio_max"), default=None),
        samples=_whole(samples),
        generated_tokens=journal.completion_tokens if journal else None,
        generated_tok_s=journal.tokens_per_s if journal else mean(column(rows, "rollout/generated_tok_s")),
        publishes=publisher.get("publishes"),
        skipped=publisher.get("skipped"),
        loads=_over_replicas(proxy, "loads"),
        load_retries=_over_replicas(proxy, "load_retries"),
        load_failures=_over_replicas(proxy, "load_failures"),
        replica_restarts=_over_replicas(proxy, "engine_restarts"),
        routing=_routing(proxy, journal),
        audited_samples=audit.get("audited_samples"),
        wrong_policy_samples=audit.get("wrong_policy_samples"),
        max_abs_logprob_diff=audit.get("max_abs_logprob_diff"),
        power_frac=audit.get("power_frac"),
        groups=Groups.model_validate(outcome.get("groups") or {}),
        eval=Evaluation.model_validate(outcome.get("eval") or {}),
        cost_usd=outcome.get("cost_usd"),
        idle_usd=outcome.get("idle_usd"),
        adapter_uri=_adapter_uri(files),
    )  # fmt: skip


def stall_seconds(files: RunFiles) -> list[float]:
    """How long the training loop stood still for each publish.

    Our seam measures it around the whole sync; a run in TRL's own order has TRL's figure. The first publish falls
    before step 1 and is waited for on purpose (its row is that of step 1), so it is left out.
    """
    running = [row for row in files.rows if row["step"] > 1]
    return column(running, "bucket_grpo/stall_s") or column(running, "perf/weight_sync_s")


def _dropped_stale_frac(rows: list[Row], samples: float | None) -> float | None:
    """TRL logs the counter only in steps that dropped something, so where staleness is known a missing one is 0."""
    if not samples or not column(rows, "sample/staleness_mean"):
        return None
    dropped = total(column(rows, "sample/dropped_stale_total")) or 0.0
    return dropped / (dropped + samples)


def _rewards(rows: list[Row]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row if name.startswith("rewards/")})
    values = {name.removeprefix("rewards/"): column(rows, name) for name in names}
    return {name: sum(known) / len(known) for name, known in values.items() if known}


def _routing(proxy: dict[str, Any], journal: JournalTotals | None) -> Routing:
    """The proxy's own counters, unless it was restarted and so counts from 0: then what the journal holds of them."""
    counted = {name: count for name, count in (proxy.get("routing") or {}).items() if name in Routing.model_fields}
    if journal and journal.requests > counted.get("requests", 0):
        counted = journal.routing()
    return Routing.model_validate(counted)


def _over_replicas(proxy: dict[str, Any], name: str) -> int | None:
    counts = [replica[name] for replica in proxy.get("replicas") or [] if replica.get(name) is not None]
    return sum(counts) if counts else None


def _adapter_uri(files: RunFiles) -> str | None:
    key, bucket = files.outcome.get("adapter"), files.run_file.get("bucket")
    return f"{bucket.rstrip('/')}/{key}" if key and bucket else key


def _largest(values: list[float]) -> int | None:
    return _whole(max(values, default=None))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _first(*values: Any) -> Any:
    """The first value that is known."""
    return next((value for value in values if value is not None), None)
