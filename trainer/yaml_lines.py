"""YAML with line numbers: a mistake in a run file is reported where it stands."""

from pathlib import Path
from typing import Any

import yaml

Lines = dict[tuple[str, ...], int]


class RunFileError(ValueError):
    """Something in a run file that the user can mend; the message names file and line."""


def read_mapping(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file, and the line of each key by its path, e.g. `("jobs", "vllm", "replicas")`.

    A key that stands twice is an error: YAML would silently keep the last.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise RunFileError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise RunFileError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(value, dict):
        raise RunFileError(f"{path}: a run file is a mapping of keys to values")
    lines: Lines = {}
    _collect(node, (), lines, path)
    return value, lines


def _collect(node: yaml.MappingNode, prefix: tuple[str, ...], lines: Lines, path: Path) -> None:
    for key, value in node.value:
        place = (*prefix, str(key.value))
        line = key.start_mark.line + 1
        if place in lines:
            raise RunFileError(
                f"{path}:{line}: {'.'.join(place)} stands here a second time; first in line {lines[place]}"
            )
        lines[place] = line
        if isinstance(value, yaml.MappingNode):
            _collect(value, place, lines, path)
