"""The checkpoints of a run: begun under another name, committed by a rename, checked and pruned.

    root/global_step_20.5c1e….partial/  being written, never read; each save has a name of its own,
                                      as a rank of a lost node may still write into an earlier one
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

The marker of a complete checkpoint: what belongs to it, and the proof that it is undamaged.

    {
      "format": 3,
      "step": 20,
      "files": {"actor/shard_00000.safetensors": {"size": 4096, "digest": "…"}, …},
      "info": {…},
      "digest": "…"          SHA-256 of the marker without this entry
    }

    damage                                  found by
    a file is missing, grown or shorter     `read_marker`, which reads no file
    a byte of a file is changed             `verify_checkpoint`, from the digest of the file
    the marker is changed                   `read_marker`, from the digest of the marker
    a file or folder is a link              `read_marker`
    files of another step or rank           `shards.load_rank_state`, from each shard

Digests show damage and mistakes. They are no protection against a person who can write to the
folder, and who can compute them again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quadriga.checkpoint.files import (
    SavedFile,
    digest_file,
    digest_json,
    is_plain_file,
    read_json,
    write_json,
)
from quadriga.config.paths import local_path
from quadriga.config.stores import MARKER
from quadriga.errors import CheckpointError
from quadriga.files import flush, remove, writing
from quadriga.observability.jsonl import JsonObject

_NAME = re.compile(r"global_step_(\d+)(\.replaced)?")


def step_folder(root: str | Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of a step."""
    return Path(local_path(root)) / f"global_step_{step}"


def begin_checkpoint(root: str | Path, step: int) -> Path:
    """Create an empty folder for all ranks to write into; then call `commit_checkpoint`.

    What a process that was killed has left of a checkpoint, of this or another step, is deleted.
    Raises `InputError` if the folder cannot be created.
    """
    partial = step_folder(root, step).with_suffix(f".{secrets.token_hex(4)}.partial")
    with writing(partial):
        for left in partial.parent.glob("global_step_*.partial"):
            with suppress(OSError):  # a rank that was cut off may write into it now
                remove(left)
        partial.mkdir(parents=True)
    return partial


def final_folder(partial: Path) -> Path:
    """Return what `commit_checkpoint` renames a folder of `begin_checkpoint` to."""
    return partial.with_name(partial.name.partition(".")[0])


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
    final = final_folder(partial)
    step = int(final.name.removeprefix("global_step_"))
    with writing(final):
        for folder in {(partial / file.name).parent for file in files}:
            flush(folder)
        write_marker(partial, step, files, info or {})
        replace_folder(partial, final)
    return final


def check_visible(partial: Path, files: Sequence[SavedFile]) -> None:
    """Raise `CheckpointError` if there is no file, or one that this process does not see."""
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


def complete_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every complete checkpoint under `root`, in the order of steps.

    Complete means that the marker was written. `verify_checkpoint` reads the files.
    """
    found: dict[int, Path] = {}
    root = Path(local_path(root))
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not path.is_symlink() and is_plain_file(path, MARKER):
            # `global_step_20` sorts before `global_step_20.replaced`, so the newer one is kept.
            found.setdefault(int(match[1]), path)
    return sorted(found.items())


def set_aside_after(root: str | Path, step: int) -> None:
    """Rename the checkpoints of later steps, so that they are neither found nor pruned.

    A run that is resumed at `step` writes later steps again. The checkpoints of the first attempt,
    among them damaged ones, must not be taken for those of the resumed run. The latest is renamed
    first: a process that is killed leaves no step without those before it.
    """
    for later, path in reversed(complete_checkpoints(root)):
        if later > step:
            ends = chain([""], map("_{}".format, count(2)))
            names = (f"global_step_{later}.set_aside{end}" for end in ends)
            target = next(t for t in map(path.with_name, names) if not os.path.lexists(t))
            os.replace(path, target)


def prune_checkpoints(root: str | Path, max_to_keep: int | None) -> list[Path]:
    """Delete the oldest complete checkpoints beyond `max_to_keep` and return their folders.

    None keeps all.
    """
    if max_to_keep is None:
        return []
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


if TYPE_CHECKING:
    from quadriga.data.loader import LoaderState

FORMAT = 3
_STEP_FOLDER = re.compile(r"global_step_(\d+)(\..*)?")
_VERIFIED: dict[Path, list[tuple[int, int, int]]] = {}
"""Folder → identity and times of its files when they were last compared with their digests."""
_SETTLED_S = 2.0  # the coarsest resolution of the times of a file system
_READERS = 8  # files that are read at the same time; SHA-256 runs without Python's lock


def write_marker(
    folder: Path, step: int, files: Iterable[SavedFile], info: Mapping[str, object]
) -> None:
    """Write the marker of a checkpoint. From then on the folder counts as complete."""
    values: dict[str, object] = {
        "format": FORMAT,
        "step": step,
        "files": {file.name: {"size": file.size, "digest": file.digest} for file in files},
        "info": dict(info),
    }
    # Through JSON, because the digest is that of the values as they are read: 10 becomes "10" where
    # it is a key.
    marker: JsonObject = json.loads(json.dumps(values))
    write_json(folder / MARKER, {**marker, "digest": digest_json(marker)})


def read_marker(folder: str | Path) -> JsonObject:
    """Return the `info` of a complete checkpoint, after every check that reads no other file.

    Raises `CheckpointError` if the marker is missing, damaged or of another format, or if a file
    that it lists is missing, is reached through a link, or has another size.
    """
    folder = Path(local_path(folder))
    marker = _read(folder)
    for file in _files(marker):
        path = folder / file.name
        if not is_plain_file(folder, file.name) or path.stat().st_size != file.size:
            what = f"is missing, is no plain file or does not have {file.size} bytes"
            raise _damaged(folder, f"lists {file.name!r}, which {what}")
    return cast(JsonObject, marker["info"])


def verify_checkpoint(folder: str | Path) -> JsonObject:
    """Return the `info` of a complete checkpoint, after a comparison of all files with digests.

    Files that this process has compared already, and that have not been written since, are not read
    again: a run checks its checkpoint before it starts a worker, and again when it loads it.

    Raises `CheckpointError` as `read_marker` does, and if the content of a file is changed.
    """
    folder = Path(local_path(folder)).absolute()
    info = read_marker(folder)
    files = _files(_read(folder))
    stats = [(folder / name).stat() for name in (MARKER, *(file.name for file in files))]
    stamps = [(stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]
    settled = time.time_ns() - max(stat.st_ctime_ns for stat in stats) > _SETTLED_S * 10**9
    if settled and _VERIFIED.get(folder) == stamps:
        return info
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda file: digest_file(folder / file.name), files)
        for file, digest in zip(files, digests, strict=True):
            if digest != file.digest:
                raise _damaged(
                    folder / file.name,
                    f"has {file.size} bytes as expected, but other content than was written "
                    f"(SHA-256 {digest[:12]}…, expected {file.digest[:12]}…)",
                )
    if settled:
        _VERIFIED[folder] = stamps
    return info


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}: the checkpoint is damaged; resume from another one", path=str(path)
    )


def _read(folder: Path) -> JsonObject:
    """Return the marker if its format, its digest and its step are as expected."""
    if not is_plain_file(folder, MARKER):
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no {MARKER}; expected a folder "
            "global_step_N in the checkpoints of a run",
            path=str(folder),
        )
    path = folder / MARKER
    marker = read_json(path)
    found = marker.get("format", 1)  # the first format did not name itself
    if found != FORMAT:
        raise CheckpointError(
            f"{folder} is a checkpoint of format {found!r}, but this version reads format "
            f"{FORMAT} only; resume it with the version that wrote it, or start a new run",
            path=str(folder),
        )
    digest = marker.pop("digest", None)
    if digest != digest_json(marker):
        raise _damaged(path, "has been changed since it was written: its digest does not match")
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != marker["step"]:
        raise CheckpointError(
            f"{path} is of step {marker['step']}, but its folder is named {folder.name}; rename "
            "the folder, or resume from another one",
            path=str(path),
        )
    return marker


def files_of(folder: Path) -> list[SavedFile]:
    """Return the files that the marker of a folder lists. Raises `CheckpointError` without one."""
    return _files(_read(folder))


def _files(marker: JsonObject) -> list[SavedFile]:
    return [SavedFile(name, f["size"], f["digest"]) for name, f in marker["files"].items()]


SavedGroups = Mapping[str, Any]
"""Role -> a worker group, whose methods no type can name here."""


@dataclass(frozen=True)
class ControllerState:
    """The state of the controller that a resumed run needs to repeat the steps of an
    uninterrupted one, and what these steps depend on.

    `validation`: the metrics of the last validation; {} if there was none. `row`: the metrics of
    the step without times, which a run that was killed before it has logged them logs when it is
    resumed.
    """

    step: int
    loader: LoaderState
    kl_controller: dict[str, float]
    inputs: dict[str, object] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    row: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Resumed:
    """A point at which a run is resumed: the folder of its checkpoint (None: the groups of the run
    hold its state, or a snapshot has it), the state of its controller, whether the data has changed
    since, and what loads the snapshot into groups by the names of their roles."""

    folder: Path | None
    state: ControllerState
    data_changed: bool
    load: Callable[[SavedGroups], None] | None = None
