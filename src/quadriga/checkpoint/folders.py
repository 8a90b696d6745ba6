"""Checkpoints of a run: begun under another name, made visible by one rename, pruned, found.

    root/global_step_20.partial/    being written; never read
    root/global_step_20/            complete: its marker, written last, lists every file's size

A process killed at any moment leaves every earlier complete checkpoint as it was.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga.checkpoint.files import flush, read_json, write_json
from quadriga.errors import CheckpointError

MARKER = "COMPLETE.json"
_NAME = re.compile(r"global_step_(\d+)(\.replaced)?")


def step_folder(root: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies once it is complete."""
    return Path(root) / f"global_step_{step}"


def begin_checkpoint(root: str | Path, step: int) -> Path:
    """A fresh folder for every rank to write into; call `commit_checkpoint` when all have."""
    partial = step_folder(root, step).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_checkpoint(partial: Path, info: Mapping[str, Any] | None = None) -> Path:
    """Make a begun checkpoint visible; returns its final folder.

    `info` (JSON values) is kept in the marker. A checkpoint of the same step is replaced; until
    that is done, one of the two can be found.
    """
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    for folder in {path.parent for path in files}:
        flush(folder)
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    write_json(partial / MARKER, {"files": sizes, "info": dict(info or {})})
    final = partial.with_suffix("")
    replaced = final.with_suffix(".replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(partial, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def read_marker(folder: str | Path) -> dict[str, Any]:
    """The `info` of a complete checkpoint.

    Raises `CheckpointError` when the marker is missing, or a file it lists is missing or of
    another size.
    """
    folder = Path(folder)
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MARKER}; name a folder "
            "global_step_N of a run's checkpoints",
            path=str(folder),
        )
    marker = read_json(folder / MARKER)
    for name, size in marker["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is missing or not of its {size} bytes; the checkpoint was damaged",
                path=str(path),
            )
    info: dict[str, Any] = marker["info"]
    return info


def complete_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint under `root`, oldest step first."""
    found: dict[int, Path] = {}
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MARKER).is_file():
            found.setdefault(int(match[1]), path)  # the plain name sorts first
    return sorted(found.items())


def latest_checkpoint(root: str | Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = complete_checkpoints(root)
    return found[-1][1] if found else None


def prune_checkpoints(root: str | Path, max_to_keep: int | None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `max_to_keep` (None: keep all)."""
    if max_to_keep is None:
        return []
    if max_to_keep < 1:
        raise CheckpointError(
            f"max_ckpt_to_keep is {max_to_keep}; expected 1 or more, or null for all",
            path=str(root),
        )
    old = [path for _, path in complete_checkpoints(root)[:-max_to_keep]]
    for path in old:
        (path / MARKER).unlink()  # from here on it is not complete, whatever remains of it
        shutil.rmtree(path)
    return old
