"""Paths in settings: a `~` at the beginning is the home folder of who starts the run.

A section replaces it when it is built, from the command line, a file or a program. So each reader
of a path, the digests of a checkpoint and the processes of other nodes see the same path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


def expand_home(path: str | Path) -> str:
    """Return a path with the home folder in place of `~` or `~user` at its beginning.

    Everything else stays as it is: a relative path, `hf://owner/name`, the name of no user.
    """
    return os.path.expanduser(path)  # unlike `Path.expanduser`, it raises nothing


@dataclass(frozen=True)
class PathSettings:
    """A section with settings that are paths, or lists of paths. Its subclasses name them."""

    PATHS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.PATHS:
            object.__setattr__(self, name, _expanded(getattr(self, name)))


def _expanded(value: object) -> object:
    """Return a path, or a list of paths, with `~` replaced; other values as they are."""
    if isinstance(value, str):
        return expand_home(value)
    return [_expanded(item) for item in value] if isinstance(value, list) else value
