"""Every command in the guide and in the notebook is one that the command line knows, with options that it has."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
import typer.main

from bucket_grpo.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
GUIDE, NOTEBOOK = DOCS / "hf-jobs.md", DOCS / "notebooks" / "launch-jobs.ipynb"


def commands() -> list[str]:
    text = GUIDE.read_text()
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            text += "\n" + "".join(cell["source"])
    found = re.findall(r"^(?:# )?!?(bucket-grpo [^#\n]+)", text, flags=re.MULTILINE)
    return [command.strip() for command in found]


def test_there_are_commands_in_the_guide_and_in_the_notebook() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize("command", commands())
def test_the_command_exists_with_these_options(command: str) -> None:
    words = shlex.split(command.replace("[", "").replace("]", ""))[1:]
    group: click.Command = typer.main.get_command(app)
    while isinstance(group, click.Group) or hasattr(group, "commands"):
        verb = words.pop(0)
        assert verb in group.commands, f"{verb} is not a verb"  # type: ignore[union-attr]
        group = group.commands[verb]  # type: ignore[union-attr]
    known = {option for parameter in group.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        if re.match(r"-{1,2}[a-z]", word):
            assert word in known, f"{word} is not an option of {command}"
