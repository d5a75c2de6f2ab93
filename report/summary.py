"""A report as a handful of sentences: what a person wants to know first. What is unknown is left out."""

from typing import Any

Line = tuple[str, str]


def summary(report: dict[str, Any]) -> list[Line]:
    """`(subject, sentence)` lines for a report as from `build_report`."""
    lines = [
        ("reward", _reward(report)),
        ("time", _time(report)),
        ("publishing", _publishing(report)),
        ("freshness", _freshness(report)),
        ("generation", _generation(report)),
        ("replicas", _replicas(report)),
        ("audit", _audit(report)),
        ("cost", None if report["cost_usd"] is None else f"${report['cost_usd']:.2f}"),
    ]
    return [(subject, sentence) for subject, sentence in lines if sentence]


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _join(*parts: str | None) -> str | None:
    return ", ".join(part for part in parts if part) or None


def _when(pattern: str, *values: Any) -> str | None:
    """The pattern filled in, if every value is known."""
    return None if any(value is None for value in values) else pattern.format(*values)


def _reward(r: dict[str, Any]) -> str | None:
    first, last = r["reward_first20"], r["reward_last20"]
    if first is None or last is None:
        return _when("{:.3f} in the last 20 steps", last)
    return f"{first:.3f} → {last:.3f} ({last - first:+.3f}; first and last 20 steps)"


def _time(r: dict[str, Any]) -> str | None:
    wall, waited = r["wall_clock_s"], r["rollout_wait_s_total"]
    return _join(
        _when("{:,} steps", r["steps"]),
        None if wall is None else f"{duration(wall)} in all",
        _when("a step takes {:.2f} s", r["step_s_p50"]),
        _when("of which {:.2f} s forward and backward", r["fwd_bwd_s_p50"]),
        None if waited is None else f"{duration(waited)} spent waiting for samples",
    )


def _publishing(r: dict[str, Any]) -> str | None:
    return _join(
        _when("{} versions", r["publishes"]),
        _when("{} overtaken", r["skipped"] or None),
        _when("training stood still {:.3f} s for each", r["stall_s_p50"]),
        _when("live after {:.1f} s", r["publish_to_live_s_p50"]),
        _when("at most {} behind", r["lag_max"]),
    )


def _freshness(r: dict[str, Any]) -> str | None:
    return _join(
        _when("samples are {:.1f} versions old on average", r["staleness_mean"]),
        _when("{:.0f} at most", r["staleness_max"]),
        _when("{:.1%} dropped as too old", r["dropped_stale_frac"]),
    )


def _generation(r: dict[str, Any]) -> str | None:
    routing = r["routing"]
    requests = routing["requests"]
    shares = [
        f"{routing[name] / requests:.1%} {name}"
        for name in ("affinity", "cold", "spilled")
        if requests and routing[name] is not None
    ]
    return _join(
        _when("{:,} completions", requests),
        *shares,
        _when("{:,} failed", routing["failed"]),
        _when("{:,.0f} tokens/s", r["generated_tok_s"]),
    )


def _replicas(r: dict[str, Any]) -> str | None:
    return _join(
        _when("{} adapter loads", r["loads"]),
        _when("{} retried", r["load_retries"]),
        _when("{} failed", r["load_failures"]),
        _when("{} engine restarts", r["replica_restarts"]),
    )


def _audit(r: dict[str, Any]) -> str | None:
    if not r["audited_samples"]:
        return None
    return _join(
        f"{r['audited_samples']:,} answers recomputed",
        f"{r['wrong_policy_samples']:,} from another policy than named",
        _when("largest difference {:.0e}", r["max_abs_logprob_diff"]),
        _when("{:.1%} would show if the version before had answered", r["power_frac"]),
    )
