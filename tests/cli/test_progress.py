import io
import re

import pytest
from rich.console import Console

from bucket_grpo.cli.progress import PLAIN_INTERVAL_S, Progress, counted
from bucket_grpo.report.figures import RunFiles, compose


class Screen:
    """A progress display on a clock that the test sets, and what it has printed."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.now = 0.0
        self.output = io.StringIO()
        console = Console(file=self.output, force_terminal=terminal, width=200, height=40, soft_wrap=True)
        self.progress = Progress(100, console=console, clock=lambda: self.now)

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output.getvalue())


def test_a_log_gets_one_line_a_phase_and_one_in_five_seconds() -> None:
    screen = Screen()
    screen.progress.phase("mounts")
    for step in range(1, 61):
        screen.now += 0.5
        screen.progress.step({"step": step, "reward": 0.5})
    lines = screen.text.splitlines()

    assert lines[0].endswith("mounts")
    assert lines[1].endswith("training")
    assert len(lines) == 2 + int(29.5 / PLAIN_INTERVAL_S)
    assert "step 60/100" not in lines[-2]


def test_a_fleet_that_does_not_change_is_told_of_once() -> None:
    screen = Screen()
    screen.progress.phase("replicas")
    for _ in range(100):
        screen.now += 1
        screen.progress.fleet({"replicas": [{"engine": "starting", "routable": False}], "live": 0})

    assert screen.text.count("replicas 0/1 (starting)") == 1


def test_the_figures_are_those_of_the_last_steps() -> None:
    screen = Screen()
    for step in range(1, 101):
        screen.progress.step({"step": step, "reward": float(step > 80), "perf/step_s": 0.25 if step > 1 else None})
    screen.now += PLAIN_INTERVAL_S
    replica = {"engine": "ready", "routable": True}
    screen.progress.fleet({"tokens_per_s": 1234.5, "live": 25, "lag": 1, "replicas": [replica, replica]})

    assert "step 100/100 · reward 1.000 · 0.25 s/step · 1,234 tok/s · v25 live, lag 1 · replicas 2/2" in screen.text


def test_a_terminal_shows_finished_phases_and_ends_with_the_cursor_visible() -> None:
    screen = Screen(terminal=True)
    screen.progress.phase("mounts")
    screen.now = 3.0
    screen.progress.step({"step": 7, "reward": 0.5})
    screen.progress.close()

    assert "✓ mounts  3.0 s" in screen.text
    assert "step 7/100" in screen.text
    assert screen.output.getvalue().rindex("\x1b[?25h") > screen.output.getvalue().rindex("\x1b[?25l")


def test_a_failure_says_when_and_why_last() -> None:
    screen = Screen(terminal=True)
    screen.progress.phase("mounts")
    screen.now = 75.0
    screen.progress.fail("the disk is full")

    assert screen.text.rstrip().endswith("failed during mounts after 1 min 15 s: the disk is full")


def test_the_table_leaves_out_what_is_unknown() -> None:
    screen = Screen()
    report = compose(RunFiles("tiny", rows=[{"step": step, "reward": 0.25} for step in range(1, 41)]))
    screen.progress.table(report.model_dump())

    assert "0.250 → 0.250 (+0.000; first and last 20 steps)" in screen.text
    assert "audit" not in screen.text
    assert "None" not in screen.text


def test_with_json_nothing_reaches_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1, to_stderr=True)
    progress.phase("mounts")
    progress.step({"step": 1, "reward": 1.0})
    progress.table(compose(RunFiles("tiny")).model_dump())
    printed = capsys.readouterr()

    assert printed.out == ""
    assert "mounts" in printed.err


@pytest.mark.parametrize("terminal", [True, False])
def test_counted_work_is_drawn_on_a_terminal_only(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with counted("auditing", console) as tell:
        tell(3, 8)
        tell(8, 8)

    assert ("8/8" in console.file.getvalue()) is terminal
