"""Paths in settings and arguments: files and folders of this machine, each through `local_path`.

A `~` at the beginning is the home folder of who starts the run. A section replaces it when it is
built, from the command line, a file or a program. So each reader of a path, the digests of a
checkpoint and the processes of other nodes see the same path. A remote path is refused there.

A trainer makes relative paths absolute when it is made (`absolute_paths`), and records them as they
were given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
_NO_PATHS = ("", "disable", "auto")  # the latter two are modes of `trainer.resume_mode`
# `Path` makes "s3:/bucket" of "s3://bucket".
_REMOTE = re.compile(r"\s*([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


def local_path(path: str | Path, key: str = "", *, hub: bool = False) -> str:
    """Return a path with the home folder in place of `~` or `~user` at its beginning.

    Everything else stays as it is: a relative path, the name of no user.

    Args:
        key: the setting or argument, for the message.
        hub: whether `hf://owner/name`, a model of the hub, may stand there.

    Raises:
        ConfigError: the path is remote: `hdfs://…`, `s3://…` or of another scheme.
    """
    text = str(path)
    remote = _REMOTE.match(text)
    if remote and not (hub and text.startswith("hf://")):
        given = f"{key}={text}" if key else text
        remedy = f"copy its files to one, or mount {remote[1]}://, and give that path"
        if remote[1].lower() in ("file", "hf"):
            remedy = f"write a path without {remote[1]}://"
        raise ConfigError(
            f"{mask_secrets(given)} is not on this machine: files are read and written in local "
            f"and mounted folders; {remedy}",
            key=key,
        )
    return os.path.expanduser(text)  # unlike `Path.expanduser`, it raises nothing


@dataclass(frozen=True)
class PathSettings:
    """A section with settings that are paths, lists of paths, or mappings in which a key `path` has
    one. Its subclasses name them in `PATHS`, and in `KEPT` the settings whose `~` stays until the
    path is used. `ON_HUB`: whether they may be models of the hub."""

    PATHS: ClassVar[tuple[str, ...]] = ()
    KEPT: ClassVar[tuple[str, ...]] = ()
    ON_HUB: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in (*self.PATHS, *self.KEPT):
            found = _each(getattr(self, name), partial(local_path, key=name, hub=self.ON_HUB))
            if name in self.PATHS:
                object.__setattr__(self, name, found)

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
