"""The fields of TRL's `AsyncGRPOConfig`, written down so that a run file can be checked without TRL or torch.

python -m bucket_grpo.trainer.trl_fields     # writes trl_fields.json anew, after a change of TRL's release
"""

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("trl_fields.json")
KINDS = (bool, int, float, str, list, dict)


def known() -> dict[str, dict[str, Any]]:
    """`{name: {"kinds": [type names], "default": value or null}}` for each field of the supported TRL release."""
    fields: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return fields


def of_installed_trl() -> dict[str, dict[str, Any]]:
    """The same, read from the TRL that is installed."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    hints = typing.get_type_hints(AsyncGRPOConfig)
    return {
        field.name: {"kinds": _kinds(hints[field.name]), "default": _plain(_default(field))}
        for field in sorted(dataclasses.fields(AsyncGRPOConfig), key=lambda field: field.name)
        if field.init
    }


def _kinds(hint: Any) -> list[str]:
    """Names of the plain types that a hint admits; an enum is written by its value, a string."""
    members = typing.get_args(hint) if typing.get_origin(hint) not in (list, dict, None) else (hint,)
    found = set()
    for member in members:
        origin = typing.get_origin(member) or member
        found.add(origin.__name__ if origin in KINDS else "null" if origin is type(None) else "str")
    return sorted(found)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    value = getattr(value, "value", value)
    return value if isinstance(value, bool | int | float | str | list | dict) else None


if __name__ == "__main__":
    FILE.write_text(json.dumps(of_installed_trl(), indent=0) + "\n")
