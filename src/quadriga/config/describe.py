"""Describe settings for `--help`: keys, types and defaults, and the comments of the schema.

The text is read from the schema, so it cannot differ from it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.convert import field_types, range_of, type_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# One line of a dataclass: "    seed: int = 0  # comment", or "    # comment" above the field.
_FIELD = re.compile(r"\s{4}(?P<name>\w+): [^#]*(?:#\s*(?P<comment>.+))?$")
_ABOVE = re.compile(r"\s{4}#\s*(?P<comment>.+)$")


@dataclass(frozen=True)
class Setting:
    """One setting. `default` is written as on the command line."""

    key: str
    kind: str
    default: str
    meaning: str


def settings_of(config: DataclassInstance, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of an object in the order of the schema; its values are the defaults."""
    cls = type(config)
    kinds, comments = field_types(cls), _comments(cls)
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from settings_of(value, f"{key}.")
        else:
            meaning = comments.get(field.name, "").replace("None:", "null:")
            kind, allowed = type_name(kinds[field.name]), range_of(kinds[field.name])
            kind = f"{kind}, {allowed}" if allowed else kind
            yield Setting(key, kind, as_written(value), meaning)


def help_text(config: DataclassInstance) -> str:
    """Return all settings of a command, one per line: `key=default  (type; comment)`."""
    lines: list[str] = []
    section = ""
    for setting in settings_of(config):
        head = setting.key.rpartition(".")[0]
        if head != section:
            section = head
            lines.append("")
        meaning = f"; {setting.meaning}" if setting.meaning else ""
        lines.append(f"  {setting.key}={setting.default}  ({setting.kind}{meaning})")
    return "\n".join(lines) + "\n"


def as_written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_written(v) or "''" for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_written(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _comments(cls: type) -> dict[str, str]:
    """Return field name → comment on its line, else above it, with those of inherited fields."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _own_comments(base)
    return comments


def _own_comments(cls: type) -> dict[str, str]:
    """Return the comments of the fields that a class itself declares; {} without its source."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if (comment := _ABOVE.match(line)) is not None:
            above.append(comment["comment"])
            continue
        if (field := _FIELD.match(line)) is not None:
            comments[field["name"]] = field["comment"] or " ".join(above)
        above = []
    return comments
