"""`bucket-grpo`: one command per verb. Each verb is a thin wrapper; what it does lies in the package of that name."""

import sys

import typer
from pydantic import ValidationError

from bucket_grpo.cli import verbs

app = typer.Typer(
    name="bucket-grpo",
    help="Async GRPO with LoRA on machines that share nothing but a storage bucket.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
verbs.register(app)


def main() -> None:
    """Console entry: a problem the user can solve is one line on stderr and exit status 1, never a traceback."""
    try:
        app()
    except (verbs.UserError, ValidationError) as error:
        print(f"bucket-grpo: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
