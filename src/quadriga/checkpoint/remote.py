"""The folder of a run in a store: the same files as in the run folder of this machine.

    s3://bucket/run/
      checkpoints/steps.json                      the steps that are complete
      checkpoints/global_step_20/…                its files first
      checkpoints/global_step_20/COMPLETE.json    then its marker: from here on it is complete
      model/…, model/COMPLETE.json                the same for the trained model
      metrics.jsonl, …                            before the marker of the checkpoint of their step

A checkpoint is found by its marker, which is read by its name. So a listing that is behind neither
hides a checkpoint, which `steps.json` names, nor shows one that is deleted. To delete one, its
marker goes first.

`run.lock` names the run that writes there. A store locks nothing: a run that takes the folder over
writes its own name, and the run before it, which looks before each upload, sends nothing more.

`Uploads` copies a run there while it goes on:

    thread of the run    save 10 ── step 11 … 19 ──── save 20 waits ── step 21
    thread of uploads        └─ files of 10, metrics, marker ─┘   └─ files of 20, …
"""

import json
import logging
import math
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from quadriga.checkpoint import folders
from quadriga.config.hub import HUB_PREFIX
from quadriga.config.paths import is_remote
from quadriga.config.schema import RunConfig
from quadriga.config.secrets import mask_secrets
from quadriga.config.stores import MARKER, Store, digests, each, listed
from quadriga.errors import CheckpointError, ConfigError, StoreError
from quadriga.files import remove
from quadriga.observability import run_folder
from quadriga.observability.run_folder import LOCK, RECORDS, Existing, RunFolder, RunLock, this_run

_log = logging.getLogger("quadriga")
_CHECKPOINTS, _MODEL = "checkpoints", "model"
_PROGRESS_S = 10.0  # between two lines while the end of a run waits
_STEPS = f"{_CHECKPOINTS}/steps.json"
_COMPLETE = re.compile(rf"global_step_(\d{{1,18}})/{MARKER}")

Sent = Callable[[str], None]
"""Is called with the name of each file that was sent."""


class RemoteRun:
    """A run in a store. All methods raise `StoreError` if the store fails."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that may be complete, in order."""
        matches = map(_COMPLETE.fullmatch, self.store.files(_CHECKPOINTS))
        named = re.findall(rb"\b\d{1,18}\b", self.store.read(_STEPS) or b"")
        return sorted({*map(int, named), *(int(match[1]) for match in matches if match)})

    def send_checkpoint(self, folder: Path, before_marker: Callable[[], None], sent: Sent) -> None:
        """Write a complete checkpoint, its marker last, after `before_marker`."""
        name, step = f"{_CHECKPOINTS}/{folder.name}", int(folder.name.split("_")[2])
        files = {file.name: file.digest for file in folders.files_of(folder)}
        others = [f"{name}/{file}" for file in self.store.files(name) if file not in files]
        self.store.remove([f"{name}/{MARKER}", *others])  # of an earlier attempt at this step
        self._send(folder, name, files, sent)
        before_marker()
        self.store.send(folder / MARKER, f"{name}/{MARKER}")
        self._write_steps({*self.steps(), step})

    def send_model(self, folder: Path, sent: Sent) -> None:
        """Write a model folder in place of the one there, with a marker."""
        self._delete(_MODEL)
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        found = {name: digests(folder / name) for name in names}
        self._send(folder, _MODEL, {name: digest for name, (_, digest, _) in found.items()}, sent)
        files = {name: {"size": size, "digest": d} for name, (size, d, _) in found.items()}
        self.store.write(f"{_MODEL}/{MARKER}", json.dumps({"files": files}, indent=1).encode())

    def _send(self, folder: Path, name: str, files: dict[str, str], sent: Sent) -> None:
        def send(file: str) -> None:
            self.store.send(folder / file, f"{name}/{file}", files[file])
            sent(f"{name}/{file}")

        each(send, files)

    def fetch_checkpoint(self, step: int, root: Path) -> bool:
        """Read a checkpoint into the folder of checkpoints of this machine. Return False if it is
        not complete.

        Raises:
            CheckpointError: it is damaged.
        """
        final = folders.step_folder(root, step)
        name = f"{_CHECKPOINTS}/{final.name}"
        marker = self.store.read(f"{name}/{MARKER}")
        if marker is None:
            return False
        partial, where = folders.begin_checkpoint(root, step), f"{self.store.url}/{name}"
        try:
            (partial / MARKER).write_bytes(marker)
            files = listed(marker, where)
            folders.files_of(partial)  # checks the marker
            each(lambda f: self.store.get(f"{name}/{f}", partial / f, *files[f]), files)
            folders.replace_folder(partial, final)
        except (CheckpointError, StoreError) as error:
            remove(partial)
            if isinstance(error, StoreError) and not error.damaged:
                raise
            text = str(error).replace(str(partial), where)
            raise CheckpointError(text, path=where) from error
        return True

    def forget(self, steps: Iterable[int]) -> None:
        """Delete checkpoints."""
        if steps := {*steps}:
            self._write_steps({*self.steps()} - steps)
        for step in steps:
            self._delete(f"{_CHECKPOINTS}/global_step_{step}")

    def delete(self, names: Iterable[str]) -> None:
        """Delete files and folders of the run."""
        self.forget(self.steps())
        for name in names:
            self._delete(name)

    def _write_steps(self, steps: Iterable[int]) -> None:
        self.store.write(_STEPS, json.dumps(sorted(steps)).encode())

    def _delete(self, name: str) -> None:
        found = [f"{name}/{file}".rstrip("/") for file in self.store.files(name)]
        self.store.remove([f"{name}/{MARKER}", *found])


class Uploads:
    """Copies checkpoints, what the run has written about its steps, and the model.

    Consumes: committed checkpoints (`add`), and the number of the last step that was logged.
    Produces: the same files in the store, compared with digests. The marker of a checkpoint is
    written after its files and after the metrics of its step.
    Waits for: `wait` for the last checkpoint, before the next one is saved; `close` for all files.
    Unblocked by: the end of an upload, also of one that has failed after the attempts of `Store`:
    the run goes on then.

    Without `trainer.remote_dir` all methods do nothing.
    """

    def __init__(self, trainer: RunConfig) -> None:
        self._trainer = trainer
        self._remote: RemoteRun | None = None
        self._thread = threading.Thread()
        self._logged, self._step = threading.Condition(), 0.0
        self._stamps: dict[str, tuple[int, int]] = {}
        self._sent, self._failed = list[str](), dict[str, None]()
        self._uploaded: Path | None = None
        self._owner = f"{this_run()}, {secrets.token_hex(4)}".encode()

    def open(self, folder: RunFolder, existing: Existing, step: int) -> None:
        """Prepare the remote folder as `RunFolder.open` has prepared that of this machine.

        Raises `StoreError` if nothing can be written there.
        """
        if self._trainer.remote_dir is None:
            return
        remote = RemoteRun(self._trainer.remote_dir)
        self._folder, self._step, self._failed = folder, step, {}
        if found := remote.store.read(LOCK):
            text = "%s was written by %s; if that run goes on, it uploads nothing more"
            _log.warning(text, mask_secrets(remote.store.url), _shown(found))
        remote.store.write(LOCK, self._owner)
        if existing == "overwrite":
            remote.delete(run_folder.ALL)
        elif existing == "resume":
            _forget_after(remote, step)
        remote.store.send(folder.config, folder.config.name)
        self._remote = remote
        resumed = folder.checkpoints / f"global_step_{step}"
        if step in remote.steps():
            self._uploaded = resumed
        elif resumed.is_dir():  # the run was killed before it was uploaded
            self.add(resumed)

    def go_back(self, step: int) -> None:
        """Let the run go on after this step, and write later ones again."""
        if (remote := self._remote) is not None:
            self.logged(math.inf)  # of steps that are not logged
            self.wait()
            self._step = step
            self._start(
                remote, "the state of remote checkpoints", lambda: _forget_after(remote, step)
            )

    def add(self, checkpoint: Path) -> None:
        """Upload a committed checkpoint, which must stay until `wait` has returned."""
        if (remote := self._remote) is not None:
            self._start(remote, checkpoint.name, lambda: self._upload(remote, checkpoint))

    def logged(self, step: float) -> None:
        """Let the marker of this step's checkpoint be written: its metrics are."""
        with self._logged:
            self._step = step
            self._logged.notify()

    def wait(self, *, shown: bool = False) -> None:
        """Wait for the upload. `shown`: print how far it is."""
        while self._thread.is_alive():
            self._thread.join(_PROGRESS_S)
            if shown and self._thread.is_alive():
                last = f", the last one {self._sent[-1]}" if self._sent else ""
                print(f"uploading: {len(self._sent)} files are done{last}", file=sys.stderr)

    def close(self, *, finished: bool) -> None:
        """Wait for all uploads. `finished`: also upload the model."""
        remote, self._remote = self._remote, None
        if remote is None:
            return
        self.logged(math.inf)
        self.wait(shown=True)
        self._start(remote, "metrics", lambda: self._send_reports(remote))
        self.wait(shown=True)
        model = self._folder.model
        if finished and model.is_dir():
            self._start(remote, "model", lambda: remote.send_model(model, self._sent.append))
            self.wait(shown=True)
        with suppress(StoreError):  # a name that stays is no error: nothing waits for it
            self._check_owner(remote)
            remote.store.remove([LOCK])
        text = f"uploaded to {remote.store.url}"
        if self._failed:
            here, steps = self._folder.path, self._folder.checkpoints
            gone = [
                n for n in self._failed if n.startswith("global_step_") and not (steps / n).is_dir()
            ]
            text = f"{remote.store.url} lacks {', '.join(self._failed)}"
            if gone:
                text += f"; {', '.join(gone)}: deleted here, by trainer.max_ckpt_to_keep"
            if len(gone) < len(self._failed):
                what = "the rest" if gone else "all of it"
                text += f"; {what} is in {here}: copy it from there"
        print(mask_secrets(text), file=sys.stderr)

    def _start(self, remote: RemoteRun, name: str, upload: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self._check_owner(remote)
                upload()
            except Exception as error:  # the run goes on, and `close` names what is missing
                self._failed[name] = None
                _log.warning("%s is not uploaded: %s", name, error)
            else:  # an earlier attempt may have failed: a restart has saved this step again
                self._failed.pop(name, None)

        self._thread = threading.Thread(target=run, name="quadriga-upload", daemon=True)
        self._thread.start()

    def _check_owner(self, remote: RemoteRun) -> None:
        """Raise `StoreError` if another run has taken over the remote folder."""
        if (found := remote.store.read(LOCK)) != self._owner:
            what = f"names another run ({_shown(found)})" if found else "was deleted"
            text = f"{LOCK} there {what}, so this run uploads nothing more"
            raise StoreError(mask_secrets(f"{remote.store.url}: {text}"), path=remote.store.url)

    def _upload(self, remote: RemoteRun, checkpoint: Path) -> None:
        step, trainer = int(checkpoint.name.split("_")[2]), self._trainer

        def send_metrics() -> None:
            with self._logged:
                self._logged.wait_for(lambda: self._step >= step)
            self._check_owner(remote)
            self._send_reports(remote)

        remote.send_checkpoint(checkpoint, send_metrics, self._sent.append)
        before, self._uploaded = self._uploaded, checkpoint
        if trainer.remove_local_after_upload and before is not None and before.is_dir():
            left = before.with_suffix(".partial")  # from here on it is no checkpoint
            before.rename(left)
            remove(left)
        keep = trainer.max_remote_ckpt_to_keep or trainer.max_ckpt_to_keep
        remote.forget(remote.steps()[:-keep] if keep else [])

    def _send_reports(self, remote: RemoteRun) -> None:
        """Upload the files that the run has changed since the last call."""
        root = self._folder.path
        kept = (root / name for name in (run_folder.CONFIG, *RECORDS))
        for path in (file for one in kept for file in (one, *one.rglob("*")) if file.is_file()):
            name, stat = str(path.relative_to(root)), path.stat()
            if (stamp := (stat.st_size, stat.st_mtime_ns)) != self._stamps.get(name):
                # The run appends to it meanwhile. The next upload replaces what a kill leaves.
                copied = shutil.copyfile(path, root / "upload.partial")
                try:
                    remote.store.send(copied, name)
                finally:
                    copied.unlink()
                self._stamps[name] = stamp


def _shown(owner: bytes) -> str:
    return repr(owner.decode(errors="replace")[:200])[1:-1]


def _forget_after(remote: RemoteRun, step: int) -> None:
    remote.forget(later for later in remote.steps() if later > step)


def check_remote_folder(trainer: RunConfig, existing: Existing) -> None:
    """Check the settings of the remote folder, and that a new run does not mix its files with those
    of another one.

    Raises:
        ConfigError: the remote folder is in the run folder, or holds files; or there is none, and
            settings of it are given.
        StoreError: the remote folder cannot be read.
    """
    key, url, problem = "trainer.remote_dir", trainer.remote_dir, ""
    if url is None:
        names = ("max_remote_ckpt_to_keep", "remove_local_after_upload")
        if given := next((name for name in names if getattr(trainer, name)), None):
            key, problem = f"trainer.{given}", f"is of the copies in {key}; set that, too"
    elif url.startswith(HUB_PREFIX):
        problem = "would be a commit for each file; for the model, set trainer.push_to_hub"
    elif not url.strip():
        problem = "= is empty; name a folder, or leave it null"
    elif not is_remote(url) and Path(url).resolve().is_relative_to(
        local := Path(trainer.default_local_dir).resolve()
    ):
        problem = f"is in the run folder {local}, which it is a copy of; choose another folder"
    elif RemoteRun(url).store.files() and existing == "refuse":
        problem = (
            "already holds files; choose another folder, resume the run there "
            "(trainer.resume_mode=auto) or replace it (trainer.overwrite=true)"
        )
    if problem:
        value = f"={mask_secrets(url)} " if url else " " if url is None else ""
        raise ConfigError(f"{key}{value}{problem}", key=key)


def fetch_newest(trainer: RunConfig) -> list[CheckpointError]:
    """Read the newest remote checkpoint without damage into the run folder, with the metrics of its
    run, if the run folder has none that is as new. Return the errors of newer ones.

    Raises:
        StoreError: the store cannot be read.
    """
    if trainer.remote_dir is None:
        return []
    folder = RunFolder(Path(trainer.default_local_dir).absolute())
    remote, errors = RemoteRun(trainer.remote_dir), list[CheckpointError]()
    local, _ = folders.newest_undamaged_checkpoint(folder.checkpoints)
    newest = -1 if local is None else int(local.stem.split("_")[2])
    steps = [step for step in reversed(remote.steps()) if step > newest]
    if not steps:
        return []
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = RunLock.acquire(folder.path / LOCK, folder.path, "trainer.default_local_dir")
    try:
        for step in steps:
            try:
                if remote.fetch_checkpoint(step, folder.checkpoints):
                    break
            except CheckpointError as error:
                errors.append(error)
        else:
            return errors
        for name, info in remote.store.files().items():
            if name.partition("/")[0] in RECORDS:
                remote.store.get(name, folder.path / name, info["size"])
    finally:
        lock.release()
    return errors
