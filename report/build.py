"""`report.json`, `reward.png` and `report.html` in a run's folder."""

from pathlib import Path
from typing import Any

from bucket_grpo.report.detail_plots import details_png
from bucket_grpo.report.doctor import diagnose
from bucket_grpo.report.figures import RunFiles, compose, gather
from bucket_grpo.report.files import write_bytes, write_json, write_text
from bucket_grpo.report.page import report_page
from bucket_grpo.report.plots import reward_png
from bucket_grpo.report.signals import signals


def build_report(run_dir: Path) -> dict[str, Any]:
    """Report on a run, finished or not.

    Returns what `report.json` holds: every field of `Report`, as plain JSON values. The pictures need matplotlib (the
    `trainer` extra); where it isn't installed there are none, and the page says so.
    """
    files = gather(run_dir)
    report = compose(files).model_dump(mode="json")
    write_json(run_dir / "report.json", report)
    pictures = _pictures(files, report["run"])
    if pictures:
        write_bytes(run_dir / "reward.png", pictures[0])
    write_text(run_dir / "report.html", report_page(report, diagnose(signals(files)), pictures))
    return report


def _pictures(files: RunFiles, title: str) -> list[bytes]:
    try:
        return [reward_png(files.rows, title), details_png(files)]
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return []
