"""Load a user's Python file that adds estimators and losses, in the controller and in workers.

Importing the file runs its decorators (`register_advantage`, `register_policy_loss`), which add to
the tables. A worker process starts with the built-in tables. The controller therefore sends
`loaded_user_files()` to each worker, and the worker calls `load_user_files` with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.config.paths import local_path
from quadriga.containment import code_runs, import_file
from quadriga.errors import InputError


@dataclass(frozen=True)
class UserFile:
    """A loaded file: its absolute path, and the SHA-256 of its content when it was loaded."""

    path: str
    sha256: str


_LOADED: dict[str, UserFile] = {}
_RUNNING: ContextVar[str | None] = ContextVar("running_user_file", default=None)


def running_user_file() -> str | None:
    """Return the absolute path of the user's file that is being imported, or None."""
    return _RUNNING.get()


def load_user_file(path: str | Path) -> tuple[str, ...]:
    """Import the user's file and return the names that it added, sorted.

    A file that is loaded already runs again only if its content has changed. Within `without_code`
    it does not run, and adds nothing.

    Raises:
        InputError: the file does not exist, is not a Python file or cannot be imported, for example
            because a name that it adds is taken.
    """
    file = Path(local_path(path)).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise InputError(f"`{path}` is not a Python file (resolved to {file}).", path=str(file))
    if not code_runs():
        return ()
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    before = _LOADED.get(str(file))
    if before is None or before.sha256 != digest:
        # If the import fails, some names of the new content are in the tables, so the file has to
        # run again also if it then has its earlier content.
        _LOADED.pop(str(file), None)
        running = _RUNNING.set(str(file))
        try:
            # The hash of the path makes the name of the module unique: two users' files in
            # different folders may have the same file name.
            name = f"quadriga_user_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
            import_file(file, "file", name)
        finally:
            _RUNNING.reset(running)
        _LOADED[str(file)] = UserFile(str(file), digest)
    added: list[str] = []
    for table in (ADVANTAGES, POLICY_LOSSES):
        added += (name for name, entry in table.items() if entry.origin == str(file))
    return tuple(sorted(added))


def loaded_user_files() -> tuple[UserFile, ...]:
    """Return the files loaded in this process, in order. A worker must load the same files."""
    return tuple(_LOADED.values())


def load_user_files(files: Iterable[UserFile | str | Path]) -> None:
    """Load each file. A file given as a `UserFile` must have the content that it describes.

    Raises:
        InputError: as in `load_user_file`, or the content differs from that on the controller's
            node.
    """
    for item in files:
        path = item.path if isinstance(item, UserFile) else item
        load_user_file(path)
        if isinstance(item, UserFile) and _LOADED[item.path].sha256 != item.sha256:
            raise InputError(
                f"`{item.path}` differs between the controller's node and this one. Copy the same "
                f"file to every node.",
                path=item.path,
            )
