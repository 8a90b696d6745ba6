"""The checkpoints of a run: begun under another name, committed by a rename, found and pruned.

    root/global_step_20.partial/      being written, never read
    root/global_step_20/              complete: its marker, written last, lists every file
    root/global_step_20.replaced/     an older checkpoint of the same step, while it is replaced
    root/global_step_20.set_aside/    of a step after the one that a run was resumed at, never read

`begin_checkpoint` creates the first folder, all ranks write into it and report their files, and
`commit_checkpoint` makes it visible. If the process is killed at any moment, the newest complete
checkpoint is found:

    killed                            on disk                               latest checkpoint
    while ranks write                 10/  20.partial/                      10
    after the marker is written       10/  20.partial/ with its marker      10
    after the rename                  10/  20/                              20

    and if step 20 is saved again:
    after the old one is renamed      20.replaced/  20.partial/             20.replaced (old)
    after the new one is renamed      20.replaced/  20/                     20 (new)
    after the old one is deleted      20/                                   20 (new)

Symbolic links in these folders are neither read through nor deleted through.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from quadriga.checkpoint.files import SavedFile, is_plain_file
from quadriga.checkpoint.marker import MARKER, verify_checkpoint, write_marker
from quadriga.errors import CheckpointError
from quadriga.files import cannot_write, flush

_NAME = re.compile(r"global_step_(\d+)(\.replaced)?")


def step_folder(root: str | Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of a step."""
    return Path(root) / f"global_step_{step}"


def begin_checkpoint(root: str | Path, step: int) -> Path:
    """Create an empty folder for all ranks to write into; then call `commit_checkpoint`.

    What a process that was killed has left of a checkpoint, of this or another step, is deleted.
    Raises `InputError` if the folder cannot be created.
    """
    partial = step_folder(root, step).with_suffix(".partial")
    try:
        for left in partial.parent.glob("global_step_*.partial"):
            remove(left)
        partial.mkdir(parents=True)
    except OSError as error:
        raise cannot_write(partial, error) from error
    return partial


def commit_checkpoint(
    partial: Path, files: Iterable[SavedFile], info: Mapping[str, object] | None = None
) -> Path:
    """Make a checkpoint visible and return its final folder.

    A checkpoint of the same step is replaced.

    Args:
        files: the files as those report them who have written them, named relative to `partial`.
        info: JSON values that are stored in the marker.

    Raises:
        CheckpointError: a reported file is not visible in this process, or there is none.
    """
    files = list(files)
    check_visible(partial, files)
    # Order matters: the content is on disk before the marker says so, and the marker before the
    # rename makes the folder visible. The ranks have flushed their files.
    final = partial.with_suffix("")
    step = int(final.name.removeprefix("global_step_"))
    try:
        for folder in {(partial / file.name).parent for file in files}:
            flush(folder)
        write_marker(partial, step, files, info or {})
        replace_folder(partial, final)
    except OSError as error:
        raise cannot_write(final, error) from error
    return final


def check_visible(partial: Path, files: Iterable[SavedFile]) -> None:
    """Raise `CheckpointError` if there is no file, or one that this process does not see."""
    files = list(files)
    if not files:
        raise CheckpointError(
            f"{partial}: no rank has reported a file, so the checkpoint would be empty; "
            "`save_checkpoint` of a worker must return the files that it has written",
            path=str(partial),
        )
    for file in files:
        if not is_plain_file(partial, file.name):
            found = "does not see it"
        elif (size := (partial / file.name).stat().st_size) != file.size:
            found = f"sees {size} bytes"
        else:
            continue
        raise CheckpointError(
            f"a rank has written {file.name} with {file.size} bytes, but the controller {found} "
            f"in {partial}; set trainer.default_local_dir to a folder that is the same one on all "
            "nodes",
            path=str(partial / file.name),
        )


def replace_folder(partial: Path, final: Path) -> None:
    """Rename a complete folder to its final name, and delete what had this name before.

    A folder cannot be renamed over a folder with files, so the old one is renamed first. Between
    the two renames only `<name>.replaced` exists; `restore_folder` repairs that.
    """
    replaced = final.with_name(final.name + ".replaced")
    if os.path.lexists(final):
        remove(replaced)
        os.replace(final, replaced)
    os.replace(partial, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)  # what stays of it is deleted the next time


def restore_folder(final: Path) -> None:
    """Rename `<name>.replaced` back if a process was killed between the renames of
    `replace_folder`, so that `final` exists again."""
    replaced = final.with_name(final.name + ".replaced")
    if not os.path.lexists(final) and replaced.is_dir() and not replaced.is_symlink():
        os.replace(replaced, final)


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, if it exists. What a link refers to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def discard_checkpoint(partial: Path) -> None:
    """Delete a checkpoint that could not be completed, as far as this is possible."""
    shutil.rmtree(partial, ignore_errors=True)


def complete_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete checkpoint under `root`, in the order of steps.

    Complete means that the marker was written. `verify_checkpoint` reads the files.
    """
    found: dict[int, Path] = {}
    root = Path(root)
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not path.is_symlink() and is_plain_file(path, MARKER):
            # `global_step_20` sorts before `global_step_20.replaced`, so the newer one is kept.
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


def latest_checkpoint(root: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step, or None."""
    found = complete_checkpoints(root)
    return found[-1][1] if found else None


def set_aside_after(root: str | Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, so that they are neither found nor pruned.

    A run that is resumed at `step` writes later steps again. The checkpoints of the first attempt,
    among them damaged ones, must not be taken for those of the resumed run. The latest is renamed
    first: a process that is killed leaves no step without those before it.

    Returns:
        The new names.
    """
    moved = []
    for later, path in reversed(complete_checkpoints(root)):
        if later > step:
            target = path.with_name(f"global_step_{later}.set_aside")
            number = 2
            while os.path.lexists(target):
                target = path.with_name(f"global_step_{later}.set_aside_{number}")
                number += 1
            os.replace(path, target)
            moved.append(target)
    return moved


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
        # Renamed, it is not a checkpoint; what stays of it is deleted with the next save.
        left = path.with_suffix(".partial")
        os.replace(path, left)
        shutil.rmtree(left)
    return old


def newest_undamaged_checkpoint(root: str | Path) -> tuple[Path | None, list[CheckpointError]]:
    """Return the newest checkpoint without damage, and the errors of newer ones.

    The folder is None if there is no checkpoint without damage. The content of the files is read;
    see `verify_checkpoint`.
    """
    errors: list[CheckpointError] = []
    for _, folder in reversed(complete_checkpoints(root)):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            errors.append(error)
        else:
            return folder, errors
    return None, errors
