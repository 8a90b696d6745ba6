"""Writes checkpoints: in the step, or beside the next steps (`trainer.async_save`).

    each rank      copies its state │ a thread writes files, then a report
    controller     waits            │ a thread: all reports ─► commit, prune old ones
    steps          wait             │ go on

The report of a rank is a file in the folder of its role. It lists the rank's files, and the
controller removes it before the commit. A checkpoint that is due while one is written waits for it.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quadriga.checkpoint import folders
from quadriga.checkpoint.files import SavedFile, read_json, write_json
from quadriga.checkpoint.remote import Uploads
from quadriga.checkpoint.shards import RankState
from quadriga.config.schema import RunConfig
from quadriga.errors import CheckpointError

_log = logging.getLogger("quadriga")

START = "start_saving"
"""The method of a worker that copies its state and writes it beside the next calls; or writes it in
the call and returns its files."""
_POLL_S = 0.05
_ALIVE_S = 1.0  # between two checks that the ranks that have not reported are alive


class CheckpointWriter:
    """Writes one checkpoint at a time.

    The checkpoint becomes visible by one rename at the end: a run that is killed before that leaves
    the earlier checkpoints, and no incomplete one.

    Args:
        trainer: the settings.
        uploads: has ended with the checkpoint before when one is begun, and is given each
            checkpoint before older ones are deleted.
        committed: is called with the folder of each checkpoint, in the thread of the steps.
    """

    def __init__(
        self, trainer: RunConfig, uploads: Uploads, committed: Callable[[Path], None]
    ) -> None:
        self.trainer, self.uploads, self._committed = trainer, uploads, committed
        self._pending: _Commit | None = None
        self._written_s: float | None = None

    def save(
        self,
        folder: Path,
        state: folders.ControllerState,
        ends: bool,
        groups: folders.SavedGroups,
        save_more: Callable[[Path], list[SavedFile]] | None = None,
    ) -> None:
        """Save groups, by the names of their roles, and the controller's state as one checkpoint.

        Waits for: the checkpoint before; with `ends`, the last one of the run, also for this one.

        Args:
            save_more: writes other files into the folder of the checkpoint, and returns them.

        Raises:
            CheckpointError: a rank has reported no file, or one that the controller cannot see.
            InputError: the folder cannot be written.
        """
        self.wait()
        self.uploads.wait()
        began = time.monotonic()
        partial = folders.begin_checkpoint(folder, state.step)
        files: list[SavedFile] = []
        started: dict[str, Any] = {}
        try:
            for role, group in groups.items():
                (partial / role).mkdir()
                beside = self.trainer.async_save and not ends
                start = getattr(group, START, None) if beside else None
                written = (start or group.save_checkpoint)(str(partial / role), state.step)
                if start is not None and not any(written):
                    started[role] = group
                else:
                    files += reported_files(role, written)
            files += save_more(partial) if save_more else []
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        commit = _Commit(self, partial, started, files, asdict(state), began)
        if started:
            self._pending = commit
            commit.start()
        else:
            commit.run()
            self._take(commit)

    def check(self) -> float | None:
        """Raise what has failed in a checkpoint that is written. Return the seconds that one took
        if it was committed since the last call."""
        if self._pending is not None:
            self._finish_ranks(self._pending, wait=False)
            if not self._pending.is_alive():
                self._end()
        seconds, self._written_s = self._written_s, None
        return seconds

    def wait(self) -> None:
        """Wait until the checkpoint that is written is committed. Raise what has failed."""
        if self._pending is not None:
            self._finish_ranks(self._pending, wait=True)
            self._end()

    def abandon(self, within_s: float, *, tell: bool = True) -> None:
        """Let a checkpoint that is written be committed within these seconds, or else give it up,
        with a warning (`tell`): the run has failed, and raises another error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.join(within_s)
            pending.give_up.set()
            pending.join()
            if tell and not pending.seconds:
                reason = pending.error or "its ranks have not written it"
                _log.warning("%s was not completed: %s", pending.folder, reason)

    def _finish_ranks(self, pending: _Commit, *, wait: bool) -> None:
        try:
            for group in pending.groups.values():
                group.finish_saving(wait)
        except BaseException as error:
            self.abandon(0, tell=isinstance(error, KeyboardInterrupt))  # a rank's error says why
            raise

    def _end(self) -> None:
        """Wait for the commit of a checkpoint whose ranks have written it."""
        assert self._pending is not None
        self._pending.join()
        commit, self._pending = self._pending, None
        self._take(commit)

    def _take(self, commit: _Commit) -> None:
        """Take the result of a commit. Raise its error."""
        if commit.error is not None:
            raise commit.error
        self._written_s = commit.seconds
        self._committed(commit.folder)


class _Commit(threading.Thread):
    """Commits a checkpoint, and deletes old ones.

    Consumes: the reports of all ranks of `groups`. Produces: the checkpoint, or `error`.
    Waits for: the reports. Unblocked by: the last of them, the death of a rank without one, or
    `give_up`.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        partial: Path,
        groups: folders.SavedGroups,
        files: list[SavedFile],
        info: Mapping[str, object],
        began: float,
    ) -> None:
        super().__init__(name="quadriga-commit", daemon=True)
        self.groups = groups
        self.give_up = threading.Event()
        self.error: Exception | None = None
        self.seconds = 0.0  # until it was committed
        self.folder = folders.final_folder(partial)
        self._writer, self._began = writer, began
        self._partial, self._files, self._info = partial, files, info

    def run(self) -> None:
        """Wait for the reports, and commit."""
        try:
            if not self._all_reported():
                return
            for role, group in self.groups.items():
                found = take_reports(self._partial / role, group.world_size)
                self._files += [file.under(role) for file in found]
            folder = folders.commit_checkpoint(self._partial, self._files, self._info)
            self._writer.uploads.add(folder)
            folders.prune_checkpoints(folder.parent, self._writer.trainer.max_ckpt_to_keep)
            self.seconds = time.monotonic() - self._began
        except Exception as error:  # raised by `CheckpointWriter`, in the thread of the steps
            self.error = error
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # unless it has its final name

    def _all_reported(self) -> bool:
        checked = time.monotonic()
        for role, group in self.groups.items():
            while missing := missing_reports(self._partial / role, group.world_size):
                if self.give_up.wait(_POLL_S):
                    return False
                if time.monotonic() - checked > _ALIVE_S:
                    checked = time.monotonic()
                    if not all(map(group.is_alive, missing)):
                        return False
        return True


def reported_files(role: str, per_rank: Sequence[Sequence[SavedFile]]) -> list[SavedFile]:
    """Return the files of all ranks of a role, named relative to the folder of the checkpoint.

    Raises:
        CheckpointError: a rank has reported none.
    """
    for rank, files in enumerate(per_rank):
        if not files or not all(isinstance(file, SavedFile) for file in files):
            raise CheckpointError(
                f"rank {rank} of role {role} has reported no files: `save_checkpoint` returned "
                f"{files!r}, expected a list of `SavedFile`"
            )
    return [file.under(role) for files in per_rank for file in files]


REPORT = "report_{:05d}.json"
"""The name of the report of a rank."""


class RankWriter:
    """Writes copies of the state of a rank, one at a time.

    Consumes: a copy. Produces: its files, then the report. Waits for: the disk.

    Attributes:
        copy: the last copy, whose memory the next one uses again.
    """

    def __init__(self) -> None:
        self.copy: RankState | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(
        self, copied: Callable[[RankState | None], RankState], write: Callable[[RankState], None]
    ) -> None:
        """Copy the state, into the memory of the last copy, and write it in a thread.

        Waits for the copy before. What failed in it and `finish` has not raised is dropped: the
        controller has given up that checkpoint, and removed its folder.
        """
        with suppress(Exception):
            self.finish(wait=True)
        self.copy = copied(self.copy)
        arguments = (self.copy, write)
        self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def finish(self, *, wait: bool) -> None:
        """Raise the error of the last copy, once. `wait`: until it is written."""
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
        if self._thread is None and self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, state: RankState, write: Callable[[RankState], None]) -> None:
        try:
            write(state)
        except Exception as error:  # raised by `finish`, in the thread of the calls
            self._error = error


def write_files(state: RankState, folder: Path) -> None:
    """Write the files of a rank into the folder of its role, then the report."""
    files = state.write(folder)
    listed = {"files": [asdict(file) for file in files]}
    write_json(folder / REPORT.format(state.origin.rank), listed)
    return_freed()


def return_freed() -> None:
    """Return the free pages of the C heap to the system, where the C library can (glibc).

    Free blocks between live ones are not returned by themselves. Over hundreds of steps, with
    batches of other sizes and several threads, they become more. A call takes milliseconds.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))


def missing_reports(folder: Path, world_size: int) -> list[int]:
    """Return the ranks of a role that have not reported."""
    return [r for r in range(world_size) if not (folder / REPORT.format(r)).is_file()]


def take_reports(folder: Path, world_size: int) -> list[SavedFile]:
    """Return the files of all ranks of a role, and remove the reports."""
    paths = [folder / REPORT.format(rank) for rank in range(world_size)]
    found = [SavedFile(**file) for path in paths for file in read_json(path)["files"]]
    for path in paths:
        path.unlink()
    return found
