"""The verbs that read finished or running runs: `report`, `completions`, `doctor`. None of them needs torch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucket_grpo.report.build import build_report
from bucket_grpo.report.completions import Completion, Sort, completions, select
from bucket_grpo.report.doctor import Diagnosis, advice_lines, diagnose
from bucket_grpo.report.figures import gather
from bucket_grpo.report.files import read_yaml
from bucket_grpo.report.page import SECTIONS, flatten, show
from bucket_grpo.report.signals import signals

RunDir = Annotated[Path, typer.Argument(help="run folder, such as runs/<run_name>", show_default=False)]
RunDirs = Annotated[list[Path], typer.Argument(help="one run folder or several to compare", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def register(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command("report")(report_verb)
    app.command("completions")(completions_verb)
    app.command("doctor")(doctor_verb)


def report_verb(runs: RunDirs, as_json: AsJson = False) -> None:
    """Write report.json, reward.png and report.html for each run, and show their figures side by side."""
    reports = [build_report(run) for run in runs]
    if as_json:
        print(json.dumps(reports[0] if len(reports) == 1 else {"runs": reports}))
        return
    console = Console(highlight=False)
    console.print(comparison(reports))
    for run in runs:
        console.print(Text(f"{run}/report.html"))
    console.print(Text(f"next: bucket-grpo doctor {runs[0]}", "dim"))


def comparison(reports: Sequence[dict[str, Any]]) -> Table:
    """Figures down, runs across; a figure that no run knows is left out."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for report in reports:
        table.add_column(report["variant"] or report["run"], justify="right", overflow="fold")
    for title, names in SECTIONS.items():
        columns = [dict(flatten(report, names)) for report in reports]
        known = dict.fromkeys(name for column in columns for name in column)
        rows = [[name, *(show(column.get(name)) for column in columns)] for name in known]
        rows = [row for row in rows if any(cell != show(None) for cell in row[1:])]
        if rows:
            table.add_row(Text(title, "bold"))
        for row in rows:
            table.add_row(*map(Text, row))
    return table


def completions_verb(
    run: RunDir,
    step: Annotated[int | None, typer.Option(help="only those answered during this optimizer step")] = None,
    version: Annotated[int | None, typer.Option(help="only those that this version answered")] = None,
    sort: Annotated[Sort, typer.Option(help="the largest first, or in the order of the answers")] = "time",
    limit: Annotated[int, typer.Option(min=1, help="how many to show")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show sampled completions: prompt, answer, reward, and the version that answered."""
    found = completions(run, tokenizer_of(run))
    chosen = select(found, step=step, version=version, sort=sort, limit=limit)
    if as_json:
        print(json.dumps({"sampled": len(found), "completions": [c.model_dump() for c in chosen]}))
        return
    console = Console(highlight=False)
    for completion in chosen:
        console.print(Text(_caption(completion), "bold"))
        console.print(Text(completion.prompt.strip(), "dim"))
        console.print(Text(completion.output.strip() + "\n"))
    console.print(Text(f"{len(chosen)} of {len(found)} sampled completions", "dim"))
    if found and all(c.reward is None for c in found):
        console.print(Text("rewards are unknown: this run kept no rollouts.jsonl", "dim"))


def tokenizer_of(run: Path) -> Callable[[Sequence[int]], str] | None:
    """A decoder for the run's model; None where transformers isn't installed or the run file names no model."""
    name = (read_yaml(run / "run.yaml") or {}).get("model_name_or_path")
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        return None
    if name is None:
        return None
    from bucket_grpo.trainer.tiny_model import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(name))
    return lambda ids: str(tokenizer.decode(list(ids)))


def _caption(c: Completion) -> str:
    parts = [f"version {c.version}", c.replica, None if c.step is None else f"step {c.step}"]
    parts += [None if c.reward is None else f"reward {c.reward:g}", f"{c.tokens} tokens", c.finish_reason]
    return " · ".join(part for part in parts if part)


def doctor_verb(run: RunDir, as_json: AsJson = False) -> None:
    """Say which side of a run is slow, or why it does not learn, and which key of the run file to change."""
    diagnosis = diagnose(signals(gather(run)))
    if as_json:
        print(json.dumps(diagnosis.model_dump()))
        return
    _show_diagnosis(diagnosis, Console(highlight=False, soft_wrap=True))


def _show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    for i, finding in enumerate(diagnosis.findings):
        console.print(Text(finding.verdict, "bold" if i == 0 else "dim"))
        for line in advice_lines(finding):
            console.print(Text(f"  {line}"))
