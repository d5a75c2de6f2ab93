"""The run as pictures: `reward.png`. Drawn without a display, from the same rows that the report is made from."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bucket_grpo.report.metrics import WINDOW, Row, number, running_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
REWARD, FORWARD, STALL, WAIT, LAG = "#1d4ed8", "#0f766e", "#dc2626", "#d97706", "#7c3aed"


STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": MUTED, "text.color": INK, "xtick.color": MUTED,
    "ytick.color": MUTED, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 7, "legend.labelspacing": 0.2, "legend.loc": "upper left",
}  # fmt: skip


def reward_png(rows: Sequence[Row], title: str) -> bytes:
    """A PNG: reward over steps with its running mean and the publishes; below it step time, staleness and tokens/s.

    Args:
        rows: as from `read_metrics`; a metric that they lack is said to be missing in its panel.
    """

    def draw(figure: "Figure") -> None:
        grid = figure.add_gridspec(2, 3, height_ratios=[1.9, 1])
        _reward(figure.add_subplot(grid[0, :]), rows, title)
        _seconds(figure.add_subplot(grid[1, 0]), rows)
        _staleness(figure.add_subplot(grid[1, 1]), rows)
        _throughput(figure.add_subplot(grid[1, 2]), rows)

    return picture(draw, size=(9, 6.2))


def picture(draw: "Callable[[Figure], None]", size: tuple[float, float]) -> bytes:
    """A PNG of what `draw` puts on a figure of `size` (width, height in inches). Needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=size, dpi=130, layout="constrained")
        try:
            draw(figure)
            png = io.BytesIO()
            figure.savefig(png, format="png")
        finally:
            plt.close(figure)
    return png.getvalue()


def points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it is known."""
    known = [(row["step"], value) for row in rows if (value := number(row, name)) is not None]
    return [step for step, _ in known], [value for _, value in known]


def panel(axes: "Axes", title: str, known: bool, xlabel: str = "step") -> None:
    """Title and labels of one small plot, or the word that there is nothing to plot."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(xlabel)
    if not known:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color=MUTED)
        axes.set_xticks([])
        axes.set_yticks([])


def _reward(axes: "Axes", rows: Sequence[Row], title: str) -> None:
    steps, rewards = points(rows, "reward")
    panel(axes, "", bool(steps))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    if not steps:
        return
    axes.plot(steps, rewards, color=REWARD, alpha=0.28, linewidth=1, label="each step")
    smooth = running_mean(rewards)
    axes.plot(steps, smooth, color=REWARD, linewidth=2.2, label=f"mean of the last {WINDOW} steps")
    axes.annotate(
        f"{smooth[-1]:.2f}", (steps[-1], smooth[-1]), xytext=(6, 0), textcoords="offset points", va="center",
        color=REWARD, fontweight="bold",
    )  # fmt: skip
    published = _went_live(rows)
    if published:
        axes.plot(
            published, [0.0] * len(published), "|", color=LAG, markersize=7, alpha=0.7, clip_on=False,
            transform=axes.get_xaxis_transform(), label=f"a new version went live ({len(published)})",
        )  # fmt: skip
    axes.set_ylabel("reward")
    axes.set_xlim(steps[0] - 0.5, steps[-1] + max(1, 0.03 * len(steps)))
    axes.legend(ncols=3, fontsize=8)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.14 * (high - low))  # room for the legend


def _went_live(rows: Sequence[Row]) -> list[int]:
    """Steps in which rollouts first asked for a newer version."""
    steps, live = points(rows, "bucket_grpo/live_version")
    return [step for step, now, before in zip(steps, live, [0.0, *live], strict=False) if now > before]


def _seconds(axes: "Axes", rows: Sequence[Row]) -> None:
    parts = [
        ("perf/fwd_bwd_s", FORWARD, "forward + backward"),
        ("perf/rollout_wait_s", WAIT, "waiting for samples"),
        ("bucket_grpo/stall_s", STALL, "stalled by a publish"),
    ]
    steps, seconds = points(rows, "perf/step_s")
    panel(axes, "Seconds of a step", bool(steps))
    if not steps:
        return
    axes.plot(steps, seconds, color=INK, linewidth=0.8, alpha=0.5, label="whole step")
    for name, color, label in parts:
        x, y = points([row for row in rows if row["step"] >= steps[0]], name)
        if x:
            axes.plot(
                x, y, "." if name.endswith("stall_s") else "-", color=color, linewidth=1, markersize=4, label=label
            )
    ordered = sorted(seconds)
    axes.set_ylim(0, 1.6 * ordered[int(0.98 * (len(ordered) - 1))])  # one slow step must not flatten the rest
    axes.legend()


def _staleness(axes: "Axes", rows: Sequence[Row]) -> None:
    steps, staleness = points(rows, "sample/staleness_mean")
    lag_steps, lag = points(rows, "bucket_grpo/lag")
    panel(axes, "Versions behind", bool(steps or lag_steps))
    if steps:
        axes.plot(steps, staleness, color=REWARD, linewidth=0.8, alpha=0.3)
        axes.plot(steps, running_mean(staleness), color=REWARD, linewidth=1.6, label="staleness of samples, mean")
    if lag_steps:
        axes.fill_between(lag_steps, lag, step="mid", color=LAG, alpha=0.45, linewidth=0, label="lag: accepted − live")
    if steps or lag_steps:
        axes.set_ylim(0, 1.45 * max(1.0, *staleness, *lag))
        axes.legend()


def _throughput(axes: "Axes", rows: Sequence[Row]) -> None:
    steps, rate = points(rows, "rollout/generated_tok_s")
    panel(axes, "Generated tokens per second", bool(steps))
    if steps:
        axes.plot(steps, rate, color=FORWARD, linewidth=0.8, alpha=0.35)
        axes.plot(steps, running_mean(rate), color=FORWARD, linewidth=1.6)
        axes.set_ylim(0, None)
