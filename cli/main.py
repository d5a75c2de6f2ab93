"""`bucket-grpo`: one command per verb. Each verb is a thin wrapper; what it does lies in the package of that name."""

import sys

import typer

from bucket_grpo.cli import jobs_verbs, reading, verbs
from bucket_grpo.cli.errors import UserError
from bucket_grpo.emulator.__main__ import app as emulator
from bucket_grpo.report.files import BrokenFile
from bucket_grpo.trainer.yaml_lines import RunFileError

app = typer.Typer(
    name="bucket-grpo",
    help="Async GRPO with LoRA on machines that share nothing but a storage bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (verbs, reading, jobs_verbs):
    part.register(app)
app.add_typer(emulator, name="emulator", help="A Hub, its jobs and its bucket mounts on this machine.")


def main() -> None:
    """Console entry: a problem the user can solve is one line on stderr and exit status 1, never a traceback."""
    try:
        app()
    except (UserError, RunFileError, BrokenFile, FileNotFoundError) as error:
        print(f"bucket-grpo: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
