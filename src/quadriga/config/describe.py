"""What settings there are, read from the schema itself: keys, types, defaults, and its comments."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quadriga.config.convert import field_types, type_name

_FIELD = re.compile(r"\s{4}(?P<name>\w+): [^#]*(?:#\s*(?P<comment>.+))?$")


@dataclass(frozen=True)
class Setting:
    """One setting. `default` is as one would write it on the command line."""

    key: str
    kind: str
    default: str
    meaning: str


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a settings object, its values as defaults, in the schema's order."""
    cls = type(config)
    kinds, comments = field_types(cls), _comments(cls)
    for field in dataclasses.fields(config):
        key, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{key}.")
        else:
            meaning = comments.get(field.name, "").replace("None:", "null:")
            yield Setting(key, type_name(kinds[field.name]), as_written(value), meaning)


def help_text(config: Any) -> str:
    """All settings of a command, one a line, as `key=default`, with what the schema says of it."""
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


def as_written(value: Any) -> str:
    """A value as on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_written(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_written(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _comments(cls: type) -> dict[str, str]:
    """Field name → the comment behind it. Empty where the source is not at hand."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    found = (_FIELD.match(line) for line in source.splitlines())
    return {m["name"]: m["comment"] for m in found if m and m["comment"]}
