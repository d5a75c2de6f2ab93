"""Reading and writing a run's files. What is missing is None, never an invented value; what is broken is an error."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml


class BrokenFile(ValueError):
    """A file of the run is there but can't be read as what it should be."""


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file. Raises `BrokenFile` for anything else."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BrokenFile(
            f"{path} is not JSON ({error}): delete it, and what it tells is reported as unknown"
        ) from error
    if not isinstance(value, dict):
        raise BrokenFile(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_yaml(path: Path) -> dict[str, Any] | None:
    """The YAML mapping in `path`; None if there is no such file."""
    try:
        value = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return None
    except yaml.YAMLError as error:
        raise BrokenFile(f"{path} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise BrokenFile(f"{path} holds a {type(value).__name__}, not a YAML mapping")
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's JSON object; None for a line that is not one. Nothing where there is no such file.

    A process that is killed leaves half a line, and its successor may write on behind it: the caller counts the Nones.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            yield value if isinstance(value, dict) else None


def write_text(path: Path, text: str) -> None:
    """Write the file so that a reader sees the old or the new content, never a part."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, indented. A NaN is no JSON: it raises `ValueError`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
