"""Load a user's Python file that adds estimators and losses, in the controller and in workers.

Importing the file runs its decorators (`register_advantage`, `register_policy_loss`), which add to
the tables. A worker process starts with the built-in tables, and loads the files itself.
"""

import hashlib
from collections.abc import Iterable
from contextvars import ContextVar
from pathlib import Path

from quadriga.config.paths import local_path
from quadriga.containment import code_runs, import_file
from quadriga.errors import InputError

_LOADED: dict[str, bytes] = {}
"""Absolute path of a file → its content when it was loaded."""
_RUNNING: ContextVar[str | None] = ContextVar("running_user_file", default=None)


def running_user_file() -> str | None:
    """Return the absolute path of the user's file that is being imported, or None."""
    return _RUNNING.get()


def loaded_files(paths: Iterable[str]) -> tuple[tuple[str, bytes], ...]:
    """Return the absolute path and the content of files that are loaded. Ranks load the same, also
    where their node has another file there, or the file was changed meanwhile."""
    files = [str(Path(path).resolve()) for path in paths]
    return tuple((file, _LOADED[file]) for file in files)


def load_user_file(path: str | Path, content: bytes | None = None) -> tuple[str, ...]:
    """Import the user's file and return the names that it added, sorted.

    A file that is loaded already runs again only if its content has changed. Within `without_code`
    it does not run, and adds nothing. `content`: what it has on the controller (`loaded_files`).

    Raises:
        InputError: the file does not exist, is not a Python file or cannot be imported, for example
            because a name that it adds is taken.
    """
    file = Path(local_path(path)).resolve()
    if content is None and (file.suffix != ".py" or not file.is_file()):
        raise InputError(f"`{path}` is not a Python file (resolved to {file}).", path=str(file))
    if not code_runs():
        return ()
    from quadriga.algorithms.advantages import ADVANTAGES  # imports torch
    from quadriga.algorithms.policy_losses import POLICY_LOSSES

    content = file.read_bytes() if content is None else content
    if _LOADED.get(str(file)) != content:
        # If the import fails, some names of the new content are in the tables, so the file has to
        # run again also if it then has its earlier content.
        _LOADED.pop(str(file), None)
        running = _RUNNING.set(str(file))
        try:
            # The hash of the path makes the name of the module unique: two users' files in
            # different folders may have the same file name.
            name = f"quadriga_user_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
            import_file(file, "file", name, content)
        finally:
            _RUNNING.reset(running)
        _LOADED[str(file)] = content
    added: list[str] = []
    for table in (ADVANTAGES, POLICY_LOSSES):
        added += (name for name, entry in table.items() if entry.origin == str(file))
    return tuple(sorted(added))
