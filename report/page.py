"""`report.html`: one self-contained page, readable without a network, a script or this package."""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

from bucket_grpo.report.doctor import Diagnosis, advice_lines
from bucket_grpo.report.summary import summary

# Which figures belong together, in the order in which a reader asks: did it learn, can I trust it, where did time go.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Outcome": (
        "exit_reason", "steps", "samples", "wall_clock_s", "time_to_first_step_s", "seed", "variant", "cost_usd",
        "idle_usd", "adapter_uri",
    ),
    "Learning": (
        "reward_first20", "reward_last20", "rewards", "eval", "zero_std_frac", "clipped_frac", "groups",
    ),
    "Trust": (
        "audited_samples", "wrong_policy_samples", "max_abs_logprob_diff", "power_frac", "abs_log_ratio_mean",
        "abs_log_ratio_max", "staleness_mean", "staleness_max", "dropped_stale_frac",
    ),
    "Time": (
        "step_s_p50", "fwd_bwd_s_p50", "stall_s_p50", "stall_s_total", "rollout_wait_s_total",
        "publish_to_live_s_p50", "queue_mean", "generated_tokens", "generated_tok_s",
    ),
    "Fleet": (
        "publishes", "skipped", "lag_max", "loads", "load_retries", "load_failures", "replica_restarts", "routing",
    ),
    "Software": ("versions", "schema_version"),
}  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #6b7280; --line: #e5e7eb; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --muted: #9ca3af; --line: #374151; --paper: #111827; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 62rem; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1rem; margin: 0 0 .4rem; }
.lead { color: var(--muted); margin: .2rem 0 1.2rem; }
img { width: 100%; border-radius: 8px; background: #fff; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 1.5rem 2rem;
  margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td { padding: .18rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.verdict { margin: 0; font-weight: 600; } ul { margin: 0 0 1rem; padding-left: 1.2rem; } img + img { margin-top: 1rem; }
.summary { margin-bottom: 1.2rem; } .summary td:last-child { text-align: left; }
td:first-child { color: var(--muted); padding-right: 1rem; white-space: nowrap; }
td:last-child { text-align: right; overflow-wrap: anywhere; }
"""


def report_page(report: dict[str, Any], diagnosis: Diagnosis, pictures: Sequence[bytes]) -> str:
    """The page for one report.

    Args:
        report: as from `build_report`.
        diagnosis: what the doctor says of the run.
        pictures: PNGs; none where they could not be drawn.
    """
    plots = "".join(f"<img alt='' src='data:image/png;base64,{base64.b64encode(png).decode()}'>" for png in pictures)
    plots = plots or "<p class=lead>No plots: matplotlib is not installed here.</p>"
    sections = "".join(
        f"<section><h2>{title}</h2><table>{''.join(_rows(report, names))}</table></section>"
        for title, names in SECTIONS.items()
    )
    lines = "".join(f"<tr><td>{subject}<td>{html.escape(sentence)}" for subject, sentence in summary(report))
    run, ended = html.escape(report["run"]), html.escape(report["exit_reason"] or "not finished")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{run}</title><style>{STYLE}</style><h1>{run}</h1><p class=lead>{ended}</p>"
        f"<table class=summary>{lines}</table>"
        f"<h2>What to change</h2>{_advice(diagnosis)}{plots}<div class=grid>{sections}</div></html>\n"
    )


def _advice(diagnosis: Diagnosis) -> str:
    def findings() -> Iterable[str]:
        for finding in diagnosis.findings:
            lines = "".join(f"<li>{html.escape(line)}" for line in advice_lines(finding))
            yield f"<p class=verdict>{finding.verdict}</p><ul>{lines}</ul>"

    return "".join(findings())


def flatten(report: dict[str, Any], names: Iterable[str]) -> Iterable[tuple[str, Any]]:
    """`(name, value)` with nested objects spread to `routing.late`, `rewards.exact`; an empty one as None."""
    for name in names:
        value = report.get(name)
        if isinstance(value, dict):
            inner = [(f"{name}.{key}", part) for key, part in value.items()]
            yield from flatten(dict(inner), [key for key, _ in inner]) if inner else [(name, None)]
        else:
            yield name, value


def show(value: Any) -> str:
    """A figure as a person reads it; an unknown one as a dash."""
    if value is None:
        return "–"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def _rows(report: dict[str, Any], names: Iterable[str]) -> Iterable[str]:
    for name, value in flatten(report, names):
        yield f"<tr><td>{html.escape(name)}<td>{html.escape(show(value))}"
