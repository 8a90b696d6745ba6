"""Paths in settings and arguments: files and folders of this machine, each through `local_path`.

A `~` at the beginning is the home folder of who starts the run. A section replaces it when it is
built, from the command line, a file or a program. So each reader of a path, the digests of a
checkpoint and the processes of other nodes see the same path. A remote path is refused there, but
for models, data files and `trainer.remote_dir`, which `quadriga.config.stores` reads and writes.

A trainer makes relative paths absolute when it is made (`absolute_paths`), and records them as they
were given.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


T = TypeVar("T", bound=Dataclass)
PROGRAM = "<program>"
"""Stands for a file in `reward.path`: the function is one of the Python program that runs."""
_NO_PATHS = ("", "disable", "auto", PROGRAM)  # disable and auto: modes of `trainer.resume_mode`
# `Path` makes "s3:/bucket" of "s3://bucket".
_REMOTE = re.compile(r"\s*([a-z][a-z0-9+.-]+):/+", re.IGNORECASE)
_FILE = re.compile(r"\s*file:(//)?(?=/[^/])", re.IGNORECASE)

STORES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "hdfs": "pyarrow", "memory": "fsspec", "hf": "huggingface_hub",
}  # fmt: skip
"""Scheme of a remote path → the package with its file system. `fsspec.register_implementation`
adds others."""


def is_remote(path: str) -> bool:
    """Return whether a path that `local_path` has returned is remote, or a model of the hub."""
    return "://" in path and _REMOTE.match(path) is not None


def local_path(
    path: str | Path, key: str = "", *, hub: bool = False, remote: bool = False, instead: str = ""
) -> str:
    """Return a path with the home folder in place of `~` or `~user` at its beginning, and without
    `file://`.

    Everything else stays as it is: a relative path, the name of no user.

    Args:
        key: the setting or argument, for the message.
        hub: whether `hf://owner/name`, a model of the hub, may stand there.
        remote: whether a path of a scheme in `STORES` may stand there.
        instead: what to do in place of a remote path, with `{}` for the path.

    Raises:
        ConfigError: the path is remote, and must not be; its scheme is unknown or lacks a package.
    """
    text = _FILE.sub("", str(path))
    found = _REMOTE.match(text)
    if found is None and "://" in text:
        problem = (
            "begins with no scheme; write a path of this machine, or one such as s3://bucket/run"
        )
        raise ConfigError(f"{mask_secrets(f'{key}={text}' if key else text)} {problem}", key=key)
    if found is None or (hub and text.startswith("hf://")):
        return os.path.expanduser(text)  # unlike `Path.expanduser`, it raises nothing
    scheme, given = found[1].lower(), f"{key}={text}" if key else text
    if remote and (problem := _problem(scheme, text[found.end() :])):
        raise ConfigError(f"{mask_secrets(given)}: {problem}", key=key)
    if remote:
        return f"{scheme}://{text[found.end() :]}"
    remedy = f"copy its files to one, or mount {scheme}://, and give that path"
    if scheme in ("file", "hf"):
        remedy = f"write a path without {scheme}://"
    raise ConfigError(
        f"{mask_secrets(given)} is not on this machine: files are read and written in local "
        f"and mounted folders; {mask_secrets(instead.format(text)) or remedy}",
        key=key,
    )


def _problem(scheme: str, name: str) -> str:
    """Return why a path cannot be read, with the remedy, or ""."""
    from fsspec.registry import known_implementations, registry

    if not name:
        return f"nothing follows {scheme}://; name a bucket or a folder there"
    if scheme not in STORES:
        known = f"write a path of this machine, or one of {', '.join(f'{s}://' for s in STORES)}"
        added = scheme in registry and scheme not in known_implementations  # by the program
        return "" if added else f"no file system is known for {scheme}://; {known}"
    package = STORES[scheme]
    there = scheme in registry or importlib.util.find_spec(package) is not None
    return "" if there else f"{scheme}:// needs the package {package}: pip install {package}"


@dataclass(frozen=True)
class PathSettings:
    """A section with settings that are paths, lists of paths, or mappings in which a key `path` has
    one. Its subclasses name them in `PATHS`, and in `KEPT` the settings whose `~` stays until the
    path is used. `ON_HUB`: whether they may be models of the hub. `REMOTE`: which of them may be
    remote. `INSTEAD`: what to do in place of a remote path."""

    PATHS: ClassVar[tuple[str, ...]] = ()
    KEPT: ClassVar[tuple[str, ...]] = ()
    ON_HUB: ClassVar[bool] = False
    REMOTE: ClassVar[tuple[str, ...]] = ()
    INSTEAD: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        for name in (*self.PATHS, *self.KEPT):
            remote, instead = name in self.REMOTE, self.INSTEAD.get(name, "")
            change = partial(local_path, key=name, hub=self.ON_HUB, remote=remote, instead=instead)
            found = _each(getattr(self, name), change)
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
    return path if path in _NO_PATHS or is_remote(path) else str(Path(path).absolute())


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
