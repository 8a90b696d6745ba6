"""The checkpoints of a run: begun under another name, committed by a rename, found and pruned.

    root/global_step_20.partial/    being written, never read
    root/global_step_20/            complete: its marker, written last, lists the size of every file
    root/global_step_20.replaced/   an older checkpoint of the same step, while it is replaced

`begin_checkpoint` creates the first folder, all ranks write into it, `commit_checkpoint` makes it
visible. If the process is killed at any moment, the newest complete checkpoint is found:

    killed                            on disk                               latest checkpoint
    while ranks write                 10/  20.partial/                      10
    after the marker is written       10/  20.partial/ with its marker      10
    after the rename                  10/  20/                              20

    and if step 20 is saved again:
    after the old one is renamed      20.replaced/  20.partial/             20.replaced (old)
    after the new one is renamed      20.replaced/  20/                     20 (new)
    after the old one is deleted      20/                                   20 (new)
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from quadriga.checkpoint.files import flush, read_json, write_json
from quadriga.errors import CheckpointError
from quadriga.observability.jsonl import JsonObject

MARKER = "COMPLETE.json"
_NAME = re.compile(r"global_step_(\d+)(\.replaced)?")


def step_folder(root: str | Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of a step."""
    return Path(root) / f"global_step_{step}"


def begin_checkpoint(root: str | Path, step: int) -> Path:
    """Create an empty folder for all ranks to write into; then call `commit_checkpoint`."""
    partial = step_folder(root, step).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_checkpoint(partial: Path, info: Mapping[str, object] | None = None) -> Path:
    """Make a checkpoint visible and return its final folder.

    `info` (JSON values) is stored in the marker. A checkpoint of the same step is replaced.
    """
    # Order matters: the content is on disk before the marker says so, and the marker before the
    # rename makes the folder visible.
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in files:
        flush(path)
    for folder in {path.parent for path in files}:
        flush(folder)
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    write_json(partial / MARKER, {"files": sizes, "info": dict(info or {})})
    final = partial.with_suffix("")
    replaced = final.with_suffix(".replaced")
    # A folder cannot be renamed over a folder with files, so the old one is renamed first. Between
    # the two renames only `.replaced` exists, and `complete_checkpoints` finds it.
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(partial, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def read_marker(folder: str | Path) -> JsonObject:
    """Return the `info` of a complete checkpoint.

    Raises `CheckpointError` if the marker is missing, or if a file that it lists is missing or has
    another size.
    """
    folder = Path(folder)
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MARKER}; expected a folder "
            "global_step_N in the checkpoints of a run",
            path=str(folder),
        )
    marker = read_json(folder / MARKER)
    for name, size in marker["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(
                f"{path} is missing or does not have {size} bytes: the checkpoint is damaged; "
                "resume from another one",
                path=str(path),
            )
    info: JsonObject = marker["info"]
    return info


def complete_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete checkpoint under `root`, in the order of steps."""
    found: dict[int, Path] = {}
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / MARKER).is_file():
            # `global_step_20` sorts before `global_step_20.replaced`, so the newer one is kept.
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    found = complete_checkpoints(root)
    return found[-1][1] if found else None


def prune_checkpoints(root: str | Path, max_to_keep: int | None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `max_to_keep` and return their folders.

    None keeps all.
    """
    if max_to_keep is None:
        return []
    if max_to_keep < 1:
        raise CheckpointError(
            f"max_ckpt_to_keep must be at least 1, or null for all, got {max_to_keep}",
            path=str(root),
        )
    old = [path for _, path in complete_checkpoints(root)[:-max_to_keep]]
    for path in old:
        # Without its marker the folder is not a checkpoint, even if only some files are deleted.
        (path / MARKER).unlink()
        shutil.rmtree(path)
    return old
