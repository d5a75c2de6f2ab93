"""What a person sees while a run goes on: the phase and its time, the step, the reward, the fleet.

On a terminal a few lines that are drawn again in place; elsewhere plain lines, one at each change of phase and then at
most one in five seconds, so that a log stays readable. With `to_stderr` nothing goes to stdout, which is then the
caller's for JSON.
"""

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from bucket_grpo.report.metrics import WINDOW, mean, number
from bucket_grpo.report.summary import duration, summary

PLAIN_INTERVAL_S = 5.0
TRAINING = "training"


class Progress:
    """Tells how a run goes. Call `phase`, `step`, `fleet` and `note` in any order, then `table` or `fail` once.

    Args:
        total_steps: optimizer steps that the run will make.
        to_stderr: keep stdout free.
        interactive: redraw in place; by default where the output is a terminal.
        clock: seconds from any start, for tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        to_stderr: bool = False,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self._total = total_steps
        self._clock = clock
        self._started = self._phase_started = clock()
        self._last_line_at = -PLAIN_INTERVAL_S
        self._last_line = ""
        self._phase = ""
        self._done: list[tuple[str, float]] = []
        self._notes: list[str] = []
        self._step = 0
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._row: dict[str, Any] = {}
        self._status: dict[str, Any] | None = None
        self._live: Live | None = None
        if self.console.is_terminal if interactive is None else interactive:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
            atexit.register(self.close)  # an exception that nobody expected must not leave the cursor hidden

    def phase(self, name: str) -> None:
        """A new phase begins, so the one before is done."""
        now = self._clock()
        if self._phase:
            self._done.append((self._phase, now - self._phase_started))
        self._phase, self._phase_started = name, now
        if self._live is None:
            self._print_line(name, always=True)

    def step(self, row: dict[str, Any]) -> None:
        """One row of `metrics.jsonl`. The first one begins the training phase."""
        if self._phase != TRAINING:
            self.phase(TRAINING)
        self._step = row["step"]  # a resumed run goes back to its checkpoint
        self._row.update((name, value) for name, value in row.items() if value is not None)
        if (reward := number(row, "reward")) is not None:
            self._rewards.append(reward)
        self._changed()

    def fleet(self, status: dict[str, Any] | None) -> None:
        """The proxy's `/status`; None while it can't be had."""
        self._status = status
        self._changed()

    def note(self, text: str) -> None:
        """A line that stays."""
        self.console.print(Text(text))

    def fail(self, message: str) -> None:
        """The run ended badly: the message, which says why and what to do, is the last thing on the screen."""
        where = f" during {self._phase}" if self._phase else ""
        self.close()
        self.console.print(
            Text(f"failed{where} after {duration(self._clock() - self._started)}: {message}", "bold red")
        )

    def table(self, report: dict[str, Any]) -> None:
        """The run is over: what came out, as from `build_report`."""
        if self._phase:
            self._done.append((self._phase, self._clock() - self._phase_started))
            self._phase = ""
        self.close()
        table = Table(title=report["run"], title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for subject, sentence in [*summary(report), ("phases", self._phases())]:
            table.add_row(subject, sentence)
        self.console.print(table, soft_wrap=False)

    def close(self) -> None:
        """Stop drawing. What `note` printed stays."""
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)
            self._live = None

    def _changed(self) -> None:
        if self._live is None:
            self._print_line(self._figures(), always=False)

    def _print_line(self, text: str, *, always: bool) -> None:
        now = self._clock()
        if not always and (now - self._last_line_at < PLAIN_INTERVAL_S or text in ("", self._last_line)):
            return
        self._last_line_at, self._last_line = now, text
        self.console.print(Text(f"[{now - self._started:6.1f} s] {text}"))

    def _draw(self) -> RenderableType:
        now = self._clock()
        lines: list[RenderableType] = [
            Text.assemble(("✓ ", "green"), name, (f"  {duration(spent)}", "dim")) for name, spent in self._done
        ]
        if self._phase:
            lines.append(Spinner("dots", Text(f"{self._phase}  {duration(now - self._phase_started)}"), style="cyan"))
        if self._step:
            lines.append(ProgressBar(self._total, self._step, width=min(60, self.console.width - 2)))
        if figures := self._figures():
            lines.append(Text(f"  {figures}", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _figures(self) -> str:
        """Everything known right now, in one line."""
        parts = []
        if self._step:
            parts.append(f"step {self._step}/{self._total}")
        if (reward := mean(list(self._rewards))) is not None:
            parts.append(f"reward {reward:.3f}")
        if (seconds := number(self._row, "perf/step_s")) is not None:
            parts.append(f"{seconds:.2f} s/step")
        return " · ".join([*parts, *self._fleet_figures()])

    def _fleet_figures(self) -> list[str]:
        if self._status is None:
            return []
        parts = []
        if (speed := self._status.get("tokens_per_s")) is not None:
            parts.append(f"{speed:,.0f} tok/s")
        if live := self._status.get("live"):
            parts.append(f"v{live} live, lag {self._status.get('lag') or 0}")
        replicas = self._status.get("replicas") or []
        ready = sum(bool(replica.get("routable")) for replica in replicas)
        states = sorted({replica.get("engine") or "unknown" for replica in replicas if not replica.get("routable")})
        parts.append(f"replicas {ready}/{len(replicas)}" + (f" ({', '.join(states)})" if states else ""))
        return parts

    def _phases(self) -> str:
        return ", ".join(f"{name} {duration(spent)}" for name, spent in self._done)


@contextlib.contextmanager
def counted(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar for work with a known amount, on stderr and only where that is a terminal.

    Gives a callback for (done, total), such as the `on_progress` of the audit.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
