"""A user's own Python file that adds estimators and losses, here and in every worker.

The file is imported as it stands; its decorators (`register_advantage`, `register_policy_loss`)
fill the tables. A worker process starts with the built-in tables only, so the controller sends
`loaded_user_files()` along, and the worker calls `load_user_files` on it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.errors import InputError


@dataclass(frozen=True)
class UserFile:
    """A file that was loaded: where it lies, and what it held then."""

    path: str
    sha256: str


_LOADED: dict[str, UserFile] = {}


def load_user_file(path: str | Path) -> tuple[str, ...]:
    """Import the user's file and return the names that it added, sorted.

    A file that was loaded already is not run again; its names are returned.

    Raises:
        InputError: no such file, not a Python file, it fails when imported, or it takes a name
            that exists.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise InputError(f"`{path}` is not a Python file (looked at {file}).", path=str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    before = _LOADED.get(str(file))
    if before is None or before.sha256 != digest:
        _run(file, f"quadriga_user_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}")
        _LOADED[str(file)] = UserFile(str(file), digest)
    return tuple(
        sorted(
            name
            for table in (ADVANTAGES, POLICY_LOSSES)
            for name, entry in table.items()
            if entry.origin == str(file)
        )
    )


def _run(file: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"`{file}` cannot be imported.", path=str(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except InputError:
        del sys.modules[module_name]
        raise
    except Exception as error:
        del sys.modules[module_name]
        raise InputError(
            f"`{file}` fails when it is imported: {type(error).__name__}: {error}", path=str(file)
        ) from error


def loaded_user_files() -> tuple[UserFile, ...]:
    """The files loaded in this process, in order: what a worker must load too."""
    return tuple(_LOADED.values())


def load_user_files(files: Iterable[UserFile | str | Path]) -> None:
    """Load each file; those given as `UserFile` must hold here what they held there.

    Raises:
        InputError: as `load_user_file`, or a file with other content than on the sender's node.
    """
    for item in files:
        path = item.path if isinstance(item, UserFile) else item
        load_user_file(path)
        if isinstance(item, UserFile) and _LOADED[item.path].sha256 != item.sha256:
            raise InputError(
                f"`{item.path}` differs between the controller's node and this one; copy the "
                f"same file to every node.",
                path=item.path,
            )
