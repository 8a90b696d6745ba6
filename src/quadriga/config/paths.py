"""Paths in settings: a `~` at the beginning is the home folder of who starts the run.

A section replaces it when it is built, from the command line, a file or a program. So each reader
of a path, the digests of a checkpoint and the processes of other nodes see the same path.

A trainer makes relative paths absolute when it is made (`absolute_paths`), and records them as they
were given.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_NO_PATHS = ("", "disable", "auto")  # the latter two are modes of `trainer.resume_mode`


def expand_home(path: str | Path) -> str:
    """Return a path with the home folder in place of `~` or `~user` at its beginning.

    Everything else stays as it is: a relative path, `hf://owner/name`, the name of no user.
    """
    return os.path.expanduser(path)  # unlike `Path.expanduser`, it raises nothing


@dataclass(frozen=True)
class PathSettings:
    """A section with settings that are paths, lists of paths, or mappings in which a key `path` has
    one. Its subclasses name them."""

    PATHS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.PATHS:
            object.__setattr__(self, name, _each(getattr(self, name), expand_home))

    def absolute(self) -> Self:
        """Return the section with absolute paths."""
        return replace(
            self, **{name: _each(getattr(self, name), absolute_path) for name in self.PATHS}
        )


def absolute_path(path: str) -> str:
    """Return a path that begins at the working directory of this moment.

    Absolute paths, `hf://owner/name` and the modes of `trainer.resume_mode` stay as they are.
    """
    return path if path in _NO_PATHS or "://" in path else str(Path(path).absolute())


def absolute_paths(config: T) -> T:
    """Return settings with absolute paths, for a run whose working directory changes later."""
    if isinstance(config, PathSettings):
        config = config.absolute()
    changed: dict[str, object] = {}
    for field in fields(config):
        section = getattr(config, field.name)
        if is_dataclass(section) and not isinstance(section, type):
            found = absolute_paths(section)
            changed |= {} if found == section else {field.name: found}
    return replace(config, **changed) if changed else config


def _each(value: object, change: Callable[[str], str]) -> object:
    """Return a path, or each path in a list or a mapping, with a change; others as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        nested = {k: v for k, v in value.items() if isinstance(v, dict) or k == "path"}
        return {**value, **{name: _each(item, change) for name, item in nested.items()}}
    return [_each(item, change) for item in value] if isinstance(value, list) else value
