"""The second picture of `report.html`: learning health, where a step's seconds go, the queue, and the versions."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bucket_grpo.report.figures import RunFiles
from bucket_grpo.report.metrics import Row, number, running_mean
from bucket_grpo.report.plots import FORWARD, INK, LAG, MUTED, REWARD, STALL, WAIT, panel, picture, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = (REWARD, FORWARD, WAIT, LAG, STALL, INK)
MAX_DOTS = 4000  # of the journal's answers; more only make the file larger


def details_png(files: RunFiles) -> bytes:
    """A PNG of nine small plots. One whose metrics were not recorded says so."""

    def draw(figure: "Figure") -> None:
        for axes, plot in zip(figure.subplots(3, 3).flat, PLOTS, strict=True):
            plot(axes, files)

    return picture(draw, size=(9, 8))


def _over_minutes(axes: "Axes", files: RunFiles) -> None:
    timed = [row for row in files.rows if number(row, "time") is not None and number(row, "reward") is not None]
    panel(axes, "Reward over minutes", bool(timed), xlabel="minutes")
    if timed:
        minutes = [(row["time"] - timed[0]["time"]) / 60 for row in timed]
        axes.plot(minutes, running_mean([row["reward"] for row in timed]), color=REWARD)


def _per_function(axes: "Axes", files: RunFiles) -> None:
    names = sorted({name for row in files.rows for name in row if name.startswith("rewards/")})
    _curves(axes, "Reward by function", files.rows, {name: name.removeprefix("rewards/") for name in names})


def _health(axes: "Axes", files: RunFiles) -> None:
    names = {
        "entropy": "entropy, nats per token",
        "completions/clipped_ratio": "cut off by the limit",
        "bucket_grpo/zero_std_frac": "groups without differences",
    }
    _curves(axes, "Learning health", files.rows, names)


def _time_budget(axes: "Axes", files: RunFiles) -> None:
    """Stacked means over some ten stretches of the run: single steps are too noisy to stack."""
    rows = [row for row in files.rows if number(row, "perf/step_s") is not None]
    panel(axes, "Where a step's seconds go", bool(rows))
    if not rows:
        return
    size = max(1, len(rows) // 12)
    stretches = [rows[i : i + size] for i in range(0, len(rows), size)]
    parts = {
        "forward": (FORWARD, _seconds_of("perf/fwd_s")),
        "backward": ("#5eead4", lambda row: _known(row, "perf/fwd_bwd_s") - _known(row, "perf/fwd_s")),
        "optimizer": (REWARD, _seconds_of("perf/optimizer_s")),
        "waiting": (WAIT, _seconds_of("perf/rollout_wait_s")),
        "stalled": (STALL, _seconds_of("bucket_grpo/stall_s")),
    }
    bottom = [0.0] * len(stretches)
    at, width = [stretch[0]["step"] for stretch in stretches], 0.9 * size
    for label, (color, seconds_of) in parts.items():
        heights = [sum(map(seconds_of, stretch)) / len(stretch) for stretch in stretches]
        axes.bar(at, heights, width, bottom=bottom, color=color, label=label, align="edge")
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    whole = [sum(_known(row, "perf/step_s") for row in stretch) / len(stretch) for stretch in stretches]
    axes.step([*at, at[-1] + size], [*whole, whole[-1]], where="post", color=INK, linewidth=1, label="whole step")
    axes.set_ylim(0, 1.5 * max(whole))
    axes.legend(ncols=2)


def _queue(axes: "Axes", files: RunFiles) -> None:
    names = {"sample/rollout_queue_size": "samples in the queue", "rollout/inflight": "rollouts in flight"}
    _curves(axes, "Queue", files.rows, names)
    if size := files.run_file.get("queue_maxsize"):
        axes.axhline(size, color=MUTED, linewidth=0.8, linestyle=":")


def _publish_latency(axes: "Axes", files: RunFiles) -> None:
    phases = {"write_s": (FORWARD, "written"), "confirm_s": (WAIT, "confirmed by the bucket")}
    live = files.publisher.get("publish_to_live_s") or []
    panel(axes, "Seconds from publish to live", bool(live), xlabel="version, in order")
    if not live:
        return
    axes.plot(range(1, len(live) + 1), live, ".", color=LAG, label="live")
    for name, (color, label) in phases.items():
        seconds = files.publisher.get(name) or []
        axes.plot(range(1, len(seconds) + 1), seconds, color=color, linewidth=1, label=label)
    axes.set_ylim(0, 1.5 * max(live))
    axes.legend()


def _answers(axes: "Axes", files: RunFiles) -> None:
    answers = sorted(files.journal.answers) if files.journal else []
    panel(axes, "Version that answered", bool(answers), xlabel="minutes")
    if not answers:
        return
    kept = answers[:: max(1, len(answers) // MAX_DOTS)]
    for color, replica in zip(PALETTE * 20, sorted({replica for _, replica, _ in answers}), strict=False):
        dots = [((t - answers[0][0]) / 60, version) for t, name, version in kept if name == replica]
        axes.plot(*zip(*dots, strict=True), ".", markersize=2, alpha=0.6, color=color, label=replica)
    axes.legend(markerscale=4)


def _log_ratio(axes: "Axes", files: RunFiles) -> None:
    names = {"bucket_grpo/abs_log_ratio_mean": "mean", "bucket_grpo/abs_log_ratio_max": "max"}
    _curves(axes, "|log-ratio| to what answered", files.rows, names, log=True)


def _lengths(axes: "Axes", files: RunFiles) -> None:
    _curves(
        axes, "Completion length, tokens", files.rows,
        {"completions/mean_length": "mean", "completions/max_length": "longest"},
    )  # fmt: skip


PLOTS: tuple[Callable[["Axes", RunFiles], None], ...] = (
    _over_minutes, _per_function, _health, _time_budget, _queue, _publish_latency, _answers, _log_ratio, _lengths,
)  # fmt: skip


def _curves(axes: "Axes", title: str, rows: Sequence[Row], names: dict[str, str], *, log: bool = False) -> None:
    found = {label: points(rows, name) for name, label in names.items()}
    known = {label: line for label, line in found.items() if line[0]}
    panel(axes, title, bool(known))
    for color, (label, (steps, values)) in zip(PALETTE * 20, known.items(), strict=False):
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.25)
        axes.plot(steps, running_mean(values), color=color, linewidth=1.5, label=label)
    if not known:
        return
    if log:
        axes.set_yscale("log")
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.0), high + 0.1 * (1 + len(known)) * (high - min(low, 0.0)))  # room for the legend
    axes.legend()


def _known(row: Row, name: str) -> float:
    """A part of a step that a row does not have took no time in it: TRL logs no stall where there was none."""
    return number(row, name) or 0.0


def _seconds_of(name: str) -> Callable[[Row], float]:
    return lambda row: _known(row, name)
