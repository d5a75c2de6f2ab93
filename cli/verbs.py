"""The verbs of `bucket-grpo`. Heavy imports stay inside the verb that needs them: `check` needs no torch."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

RunDir = Annotated[Path, typer.Argument(help="run folder, such as runs/demo-20261130-154500", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def register(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(audit)
    app.command()(check)


def demo(
    run_file: Annotated[Path | None, typer.Argument(help="run file; default: the recipe tiny-addition")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="optimizer steps; default: the run file's (200)")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, max=8, help="default: the run file's (2)")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="default: the run file's (42)")] = None,
    port: Annotated[int, typer.Option(help="port of the proxy on 127.0.0.1; 0: any free one")] = 0,
    run_dir: Annotated[Path | None, typer.Option(help="where the run's files go; default: runs/demo-<UTC>")] = None,
    profile: Annotated[str, typer.Option(help="how the bucket's mounts behave")] = "hf-mount-2026-09",
    time_scale: Annotated[float, typer.Option(min=0.0, help="multiplies the mounts' delays")] = 1.0,
    keep: Annotated[bool, typer.Option("--keep", help="keep staging folders and TRL's own output too")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the main job on this machine: trainer, proxy, vLLM replicas and their mounts of one bucket, all real."""
    from bucket_grpo.cli.demo import DemoOptions, run_demo

    options = DemoOptions(
        run_file=run_file,
        run_dir=run_dir or Path("runs") / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}",
        replicas=replicas,
        port=port,
        profile=profile,
        time_scale=time_scale,
        keep=keep,
        overrides={name: value for name, value in {"max_steps": steps, "seed": seed}.items() if value is not None},
    )
    status = run_demo(options, as_json=as_json)
    raise typer.Exit(status)


def audit(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Recompute sampled answers with the published version that the journal names, and count those that differ."""
    from bucket_grpo.cli.progress import counted
    from bucket_grpo.trainer.audit import audit_folder

    with counted("auditing") as tell:
        result = audit_folder(run_dir, on_progress=tell)
    if as_json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            if key != "worst":
                print(f"{key:28} {value}")
    raise typer.Exit(1 if result["wrong_policy_samples"] else 0)


def check(run_file: Annotated[Path, typer.Argument(help="run file to resolve")]) -> None:
    """Print the run file as it will be used, every default filled in."""
    from bucket_grpo.trainer.run_file import RunFile

    sys.stdout.write(RunFile.load(run_file).dump())
