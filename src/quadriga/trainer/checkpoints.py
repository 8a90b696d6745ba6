"""Resuming a run: which checkpoint is loaded, what the controller stores in it, and what has
changed since."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from quadriga.checkpoint import folders
from quadriga.checkpoint.files import digest_file, digest_json
from quadriga.checkpoint.remote import Uploads, fetch_newest
from quadriga.checkpoint.snapshots import Snapshots
from quadriga.checkpoint.writer import CheckpointWriter
from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import setting_leaves, written_settings
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.config.stores import local_file
from quadriga.containment import leave_closed_terminal
from quadriga.errors import CheckpointError, ConfigError, InputError, QuadrigaError, first_line
from quadriga.files import refusal_in
from quadriga.models.folder import local_folder
from quadriga.observability.callbacks import Callbacks, callback_file
from quadriga.observability.run_folder import CHECKPOINTS
from quadriga.trainer.restarts import Restarts
from quadriga.trainer.roles.needs import needs_critic
from quadriga.trainer.roles.registry import Role, added_roles
from quadriga.trainer.roles.workers import saving_roles

if TYPE_CHECKING:
    from quadriga.data import PromptLoader
    from quadriga.trainer.record import RunRecord

_log = logging.getLogger("quadriga")

AnyRun = TrainConfig | SFTConfig | RMConfig
"""The settings of a command that trains."""

_ARGUMENTS = "data.chat_template_kwargs"  # each of its names is a key of its own
# What decides on the rows and their order. The position in the data means nothing without them.
_DATA = (
    "content of data.train_files", "data.train_batch_size", "data.shuffle", "data.seed",
    "data.prompt_key", "data.response_key", "data.messages_key", "data.chosen_key",
    "data.rejected_key", "data.image_key", "data.max_prompt_length", "data.max_length", _ARGUMENTS,
    "data.filter_overlong_prompts", "data.special_tokens", "data.train_weights",
    "content of data.dataset.path", "data.dataset.name", "content of data.sampler.path",
    "data.sampler.name", "trainer.seed",
)  # fmt: skip
_OF_MODEL = (
    "config.json of {}.path", "adapter_config.json of {}.lora.path", "{}.freeze", "{}.lora.rank",
    "{}.lora.alpha", "{}.lora.target_modules", "{}.lora.exclude_modules",
)  # fmt: skip
# What the stored weights, moments and coefficients belong to.
_MODEL = (
    *(name.format(key) for key in ("actor_rollout_ref.model", "critic.model", "model")
      for name in _OF_MODEL),
    "algorithm.adv_estimator", "algorithm.kl_ctrl.type",
)  # fmt: skip
_STALENESS = "trainer.max_staleness"
# What the responses of prompts on their way have a form of.
_OF_RESPONSES = (
    "actor_rollout_ref.rollout.n", "data.max_response_length", "algorithm.reward_components",
)  # fmt: skip
STREAMED = "stream"
"""The folder of a checkpoint with the prompt groups on their way."""
# Settings that do not change what a run computes.
_WITHOUT_EFFECT = {"data.cache_dir"} | {
    f"trainer.{name}"
    for name in (
        "default_local_dir", "remote_dir", "max_remote_ckpt_to_keep", "remove_local_after_upload",
        "resume_mode", "resume_override", "overwrite", "loggers",
        "project_name", "experiment_name", "logger_timeout_s", "samples_per_step", "test_freq",
        "val_before_train", "save_freq", "save_interval_s", "async_save", "snapshot_freq",
        "save_on_stop", "stop_grace_s", "deadline", "stop_file", "max_ckpt_to_keep",
        "call_timeout_s", "num_cpus", "threads_per_worker", "check_memory", "device_memory_gb",
        "max_restarts", "restart_window_s", "restart_wait_s",
    )
}  # fmt: skip


def checkpoint_to_resume(trainer: RunConfig, *, tell: bool = False) -> Path | None:
    """Return the folder that `trainer.resume_mode` names, or None for a fresh start.

    "auto" names the newest checkpoint of the run folder without damage, if there is one. All files
    are compared with their digests. `tell`: log a warning for each checkpoint that is left out.

    Raises:
        CheckpointError: the named folder is damaged or does not exist, or the run folder has
            checkpoints and all are damaged.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode != "auto":
        path = Path(trainer.resume_mode).absolute()
        if not (trainer.resume_mode and path.is_dir()):
            raise CheckpointError(
                f"trainer.resume_mode={trainer.resume_mode and path}: no such folder; set it to "
                "disable, auto, or the folder of a checkpoint",
                path=str(path),
            )
        folders.verify_checkpoint(path)
        return path
    root = Path(trainer.default_local_dir).absolute() / CHECKPOINTS
    remote_errors = fetch_newest(trainer)
    found, errors = folders.newest_undamaged_checkpoint(root)
    errors = [*remote_errors, *errors]
    if found is None and errors:
        raise CheckpointError(
            f"trainer.resume_mode=auto: no checkpoint in {root} can be used. {errors[0]}; to start "
            "again from step 1, set trainer.resume_mode=disable",
            path=str(root),
        )
    for error in errors if tell else ():
        _log.warning("skipped a checkpoint: %s", error)
    return found


def read_state(checkpoint: Path) -> folders.ControllerState:
    """Read the controller's state from a checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was not written by a training run.
    """
    info = folders.read_marker(checkpoint)
    try:
        return folders.ControllerState(**info)
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint} does not hold the state of a training run: {error}", path=str(checkpoint)
        ) from error


def inputs_of(config: AnyRun) -> dict[str, object]:
    """Return what the steps of a run depend on: the settings by dotted key, and the contents of
    files as digests. Secrets are masked and `${…}` are unresolved, as in `config.yaml`."""
    files: dict[str, Sequence[str | None]] = {
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
    }
    found: dict[str, object] = dict(setting_leaves(written_settings(config)))
    if isinstance(config, TrainConfig):
        models = {
            "actor_rollout_ref.model": config.actor_rollout_ref.model,
            "critic.model": config.critic.model,
        }
        files["algorithm.user_files"] = config.algorithm.user_files
        files["agent.path"] = [config.agent.path]
        files["data.dataset.path"] = [config.data.dataset.path]
        files["data.sampler.path"] = [config.data.sampler.path]
        # A role of the user in its place has a section of another class.
        path = config.reward_model.model.path if has_reward_model(config) else ""
        found["config.json of reward_model.model.path"] = _file_digest("config.json", path)
    else:
        models = {"model": config.model}
    if not isinstance(config, RMConfig):
        parts = config.reward.parts.values()
        files["reward.path"] = [config.reward.path]
        files["reward.parts"] = [part.get("path") for part in parts if isinstance(part, dict)]
    files["trainer.callbacks"] = [str(callback_file(one)) for one in config.trainer.callbacks]
    for key, names in files.items():
        found[f"content of {key}"] = contents_digest([name for name in names if name])
    for key, model in models.items():
        found[f"config.json of {key}.path"] = _file_digest("config.json", model.path)
        adapter = _file_digest("adapter_config.json", model.lora.path)
        found[f"adapter_config.json of {key}.lora.path"] = adapter
    return found


def _file_digest(name: str, folder: str | None) -> str:
    """Return the digest of a file in the folder of a model or adapter."""
    return contents_digest([str(local_folder(folder) / name)] if folder else [])


def contents_digest(files: Sequence[str]) -> str:
    """Return one digest for the contents of files, in their order; a missing one counts as empty.

    Names are left out: the same data in another folder is the same data.
    """
    paths = map(local_file, files)
    contents = [digest_file(path) if path.is_file() else "" for path in paths]
    return digest_json({"contents": contents})


def check_changes(
    checkpoint: Path,
    saved: Mapping[str, object],
    own: Mapping[str, object],
    *,
    override: bool,
    tell: bool,
) -> bool:
    """Compare two results of `inputs_of`: of a checkpoint, and of the run that resumes it.

    Args:
        override: the user insists on the changes with which a run cannot be continued.
        tell: log all changes as one warning.

    Returns:
        Whether the position in the data cannot be continued.

    Raises:
        CheckpointError: names the changes of data, weights or coefficients.
    """
    changes = changed_inputs(saved, own)
    lines = {key: words for key, words in changes.items() if key not in _WITHOUT_EFFECT}
    data = [key for key in lines if key in _DATA or key.startswith(f"{_ARGUMENTS}.")]
    refused = [*data, *(key for key in lines if key in _MODEL)]
    if refused and not override:
        raise CheckpointError(
            f"{checkpoint} cannot be continued with these changes: "
            f"{'; '.join(lines[key] for key in refused)}; undo them, start a new run, or set "
            "trainer.resume_override=true, with which changed data begins at the start of the "
            "epoch",
            path=str(checkpoint),
        )
    before, after = (int(str(found.get(_STALENESS, 0))) for found in (saved, own))
    unfit = [lines[key] for key in _OF_RESPONSES if key in lines]
    unfit += [lines[_STALENESS]] if after < before else []
    if unfit and not data and any((checkpoint / STREAMED).glob("*")):
        raise CheckpointError(
            f"{checkpoint} holds prompts on their way, which do not fit these changes: "
            f"{'; '.join(unfit)}; undo them",
            path=str(checkpoint),
        )
    if tell and lines:
        order = dict.fromkeys([*refused, *lines])
        _log.warning(
            "%s is resumed with changes: %s", checkpoint, "; ".join(lines[key] for key in order)
        )
    return bool(data)


def changed_inputs(saved: Mapping[str, object], own: Mapping[str, object]) -> dict[str, str]:
    """Return the inputs that differ → the change in words: "n: 2 → 4"."""
    changed: dict[str, str] = {}
    for key in {**own, **saved}:
        before, after = saved.get(key), own.get(key)
        if before != after:
            is_digest = key.startswith(("content of", "config.json of", "adapter_config.json of"))
            changed[key] = (
                f"the {key} is another one" if is_digest else f"{key}: {before} → {after}"
            )
    return changed


def read_resumed(
    config: AnyRun, inputs: Mapping[str, object] | None = None, *, tell: bool = False
) -> folders.Resumed | None:
    """Return the checkpoint that a run will be resumed from, or None, after all checks of it.

    Args:
        inputs: `inputs_of` the run; None: they are read.
        tell: log what has changed, and which checkpoints are damaged.

    Raises:
        CheckpointError: it is damaged, or cannot be continued with these settings and data.
    """
    folder = checkpoint_to_resume(config.trainer, tell=tell)
    if folder is None:
        return None
    state = read_state(folder)
    own = inputs_of(config) if inputs is None else inputs
    override = config.trainer.resume_override
    changed = check_changes(folder, state.inputs, own, override=override, tell=tell)
    check_states(folder, _saved_roles(config))
    return folders.Resumed(folder, state, changed)


def check_states(checkpoint: Path, keys: Iterable[str]) -> None:
    """Check that a checkpoint holds the states of roles, by their keys.

    Raises:
        CheckpointError: it was saved without one of them.
    """
    for key in keys:
        if not (checkpoint / key).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state of role {key}, whose workers save one: it was saved "
                "without this role; resume with the roles of that run, or start a new run",
                path=str(checkpoint),
            )


def _saved_roles(config: AnyRun) -> list[str]:
    """Return the keys of the roles whose states a checkpoint of the run must hold."""
    if isinstance(config, TrainConfig):
        critic = ["critic"] if needs_critic(config) else []
        return ["actor", *critic, *saving_roles(added_roles(config))]
    return [Role.Actor.key if isinstance(config, SFTConfig) else Role.RewardModel.key]


Save = Callable[[Path, folders.ControllerState, bool], None]
"""Writes a checkpoint: the folder of checkpoints, the state of the controller, and whether the run
ends with it."""


class Checkpointing:
    """Finds the point at which a run is resumed or goes on after a loss, and says when the next
    checkpoint is due.

    Args:
        given: the settings as the user gave them, which a checkpoint records; None: `config`.
        callbacks: of the program, beside those of the settings.

    Attributes:
        callbacks: are told what happens; one of them may end the run.
        stop: whether a signal has asked the run to stop.
        restarts: counts the losses of the run.
        held: the point that all groups hold, from the beginning of a step to its first update.
        complete: a step and the state of its KL controller, from its end to the next step.
    """

    def __init__(
        self,
        config: AnyRun,
        loader: PromptLoader,
        given: AnyRun | None = None,
        callbacks: Iterable[object] = (),
    ) -> None:
        trainer = config.trainer
        self.callbacks = Callbacks([*trainer.callbacks, *callbacks])
        self.config = config
        self.loader = loader
        self.inputs = inputs_of(given or config)
        self._saved_at = time.monotonic()
        self.uploads = Uploads(trainer)
        self.writer = CheckpointWriter(trainer, self.uploads, self.callbacks.saved)
        self.stop = StopRequest(trainer)
        self.restarts = Restarts(trainer, lambda: self.stop.requested)
        self.held: folders.Resumed | None = None
        self.snapshots = Snapshots(trainer.snapshot_freq)
        self.complete: tuple[int, Mapping[str, float]] | None = None
        # Streams and added roles with a state have changed when a step has begun.
        self._kept_in_step = isinstance(config, TrainConfig) and not (
            config.trainer.max_staleness or saving_roles(added_roles(config))
        )
        self._beginning = loader.state_dict()
        self._resumed: folders.Resumed | None = None  # the point at which the run was resumed

    def resume(self, groups: folders.SavedGroups) -> folders.Resumed | None:
        """Find the checkpoint that `trainer.resume_mode` names, or after a loss the newest point,
        and move the loader to its position. The caller loads the states of `groups`, the roles.

        Raises:
            CheckpointError: it is damaged, or belongs to other data or another model.
        """
        self.callbacks.groups = groups
        if self.restarts.running:
            resumed = self.newest_point(groups)
        else:
            resumed = self._resumed = read_resumed(self.config, self.inputs, tell=True)
        if resumed is not None:
            position = resumed.state.loader
            if resumed.data_changed:  # other data begin at the start of the epoch
                own = self.loader.state_dict()
                position = {**own, "epoch": position["epoch"], "batches_done": 0}
            self.loader.load_state_dict(position)
        elif self.restarts.count:
            self.loader.load_state_dict(self._beginning)
        return resumed

    @contextmanager
    def finishing(self, record: RunRecord, save: Save) -> Iterator[None]:
        """Tell callbacks that the run begins, and wait at the end of the block for the checkpoint
        that is written, also after an error (`stop_grace_s` at most), but not when the run is
        interrupted. Save what an error leaves."""
        try:
            record.begin(self.restarts.completed)
            yield
            self.writer.wait()
        except BaseException as error:
            at_once = isinstance(error, KeyboardInterrupt)
            self.writer.abandon(0 if at_once else self.config.trainer.stop_grace_s)
            # Of input: the disk is full, for example, or another run writes into the folder.
            of_input = isinstance(error, InputError) or refusal_in(error) is not None
            if not (at_once or of_input or self.restarts.is_loss(error)):
                self._save_in_emergency(record, save)
            raise

    def _save_in_emergency(self, record: RunRecord, save: Save) -> None:
        """Save the last step that all roles hold, if there is no checkpoint of it."""
        held = None if self.held is None or not self._kept_in_step else self.held.state
        state = held if self.complete is None else self.state(*self.complete)
        folder = record.folder.checkpoints
        if state is None or state.step == 0 or folders.step_folder(folder, state.step).is_dir():
            return
        try:
            save(folder, state, True)
        except (QuadrigaError, OSError) as error:
            text = "the run ends by an error, and step %d could not be saved: %s"
            _log.warning(text, state.step, first_line(error))
        else:
            text = "the run ends by an error; step %d was saved, for trainer.resume_mode=auto"
            _log.warning(text, state.step)

    def newest_point(self, groups: folders.SavedGroups) -> folders.Resumed | None:
        """Return the newest point to which the run can go back after a loss; None: its beginning.

        No other place chooses one. Each attempt of a run asks once, when its groups are started,
        and `groups.load` then loads the point's `folder`, unless the groups hold the point already
        (`folder` is None) or a snapshot has it (`load`).
        """
        if self.held is not None:
            return self.held
        root = Path(self.config.trainer.default_local_dir).absolute() / CHECKPOINTS
        saved = max((step for step, _ in folders.complete_checkpoints(root)), default=0)
        if (snapshot := self.snapshots.newest(groups, after=saved)) is not None:
            return snapshot
        folder, errors = folders.newest_undamaged_checkpoint(root)
        for error in errors:
            _log.warning("skipped a checkpoint: %s", error)
        if folder is None:
            return self._resumed
        return folders.Resumed(folder, read_state(folder), False)

    def begin_step(self, step: int, kl_controller: Mapping[str, float]) -> None:
        """Note that a step begins after `step`, the last one that was completed: until the first
        update, every group holds this point."""
        self.restarts.completed = step
        self.complete = None
        self.held = folders.Resumed(None, self.state(step, kl_controller), False)

    def begin_update(self) -> None:
        """Note that from here on the states of roles change, until the step is complete."""
        self.held = self.complete = None

    def state(self, step: int, kl_controller: Mapping[str, float]) -> folders.ControllerState:
        """Return the state of the controller after a step of the run, whose record is open."""
        position, kl = self.loader.state_dict(), dict(kl_controller)
        validation, row = self.restarts.last_validation, self.restarts.row
        return folders.ControllerState(step, position, kl, self.inputs, validation, row)

    def end_step(
        self,
        record: RunRecord,
        *,
        validate: Callable[[], object] | None,
        save: Save,
        groups: folders.SavedGroups,
    ) -> None:
        """Tell callbacks, validate and save where these are due, and log the step that is
        `complete`. Then stop if a signal asks for it.

        A step is saved, too, if its validation fails or is interrupted, or if the writing of an
        earlier checkpoint has failed. A run that is asked to stop validates after its last step
        only.

        Args:
            validate: logs the validation; None: there is no validation data.
            save: writes the states of the roles, and that of the controller.
            groups: the roles, which copy their states to keepers.
        """
        assert self.complete is not None
        step, _ = self.complete
        last, every = step == record.total_steps, self.config.trainer.test_freq
        if not last:
            self.stop.look()
        again = False  # after a loss, the step is done again
        try:
            self._check_written(record)
            self.callbacks.step(step, record.samples("train"))
            last |= self.callbacks.stopped(step)
            due = last or (every > 0 and step % every == 0 and not self.stop.requested)
            if validate is not None and due:
                validate()
                self.callbacks.validation(step, record.samples("val"))
                last |= self.callbacks.stopped(step)
        except BaseException as error:  # also a second signal, or the end of `stop_grace_s`
            again = self.restarts.allows(error)
            if not again:
                with suppress(QuadrigaError):  # a rank that has failed cannot save either
                    self._save_if_due(record, save, last=last, ends=True)
            raise
        else:
            ends = last or self.stop.requested
            self._save_if_due(record, save, last=last, ends=ends)
            every = self.snapshots.every
            if every and step % every == 0 and not ends:
                with record.span("snapshot"):
                    self.snapshots.take(self.state(*self.complete), groups)
        finally:
            if not again:
                record.end_step(step)
        self.stop.stop_if_requested()

    def _save_if_due(self, record: RunRecord, save: Save, *, last: bool, ends: bool) -> None:
        assert self.complete is not None
        step, kl_controller = self.complete
        every, interval_s = self.config.trainer.save_freq, self.config.trainer.save_interval_s
        by_number = last or (every > 0 and step % every == 0)
        by_time = interval_s is not None and time.monotonic() - self._saved_at >= interval_s
        if not (by_number or by_time or self.stop.requested):
            return
        with record.span("save"):
            save(record.folder.checkpoints, self.state(step, kl_controller), ends)
        self._saved_at = time.monotonic()
        self._check_written(record)

    def _check_written(self, record: RunRecord) -> None:
        """Raise what has failed in a checkpoint that is written, and log the time of one that is
        committed."""
        seconds = self.writer.check()
        if seconds is not None:
            record.add({"time/written": seconds})


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_OF_ALL = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that all processes of a run receive: from `sbatch --signal=USR1@…`, or when its terminal
is closed. The run stops as after SIGTERM."""


def seconds_left(trainer: RunConfig) -> float | None:
    """Return the seconds until `trainer.deadline`; None without one.

    Raises:
        ConfigError: it is no moment or is over, or `trainer.stop_file` exists already or can never
            be seen.
    """
    try:
        exists = trainer.stop_file and Path(trainer.stop_file).exists()
    except OSError as error:
        raise ConfigError(
            f"trainer.stop_file={trainer.stop_file} cannot be looked for: {error.strerror}; choose "
            "another file, or null",
            key="trainer.stop_file",
        ) from error
    if exists:
        raise ConfigError(
            f"trainer.stop_file={trainer.stop_file} exists already, so the run would stop after "
            "one step; remove the file",
            key="trainer.stop_file",
        )
    if trainer.deadline is None:
        return None
    written, key = f"trainer.deadline={trainer.deadline}", "trainer.deadline"
    try:
        end = datetime.fromisoformat(trainer.deadline)
    except ValueError:
        raise ConfigError(
            f"{written} is no moment; write it as 2026-11-27T06:00 in local time, or with an "
            "offset: 2026-11-27T06:00+00:00",
            key=key,
        ) from None
    left = end.timestamp() - time.time()
    if left <= trainer.stop_grace_s:
        needs = f"trainer.stop_grace_s={trainer.stop_grace_s:g} s of it are for the last checkpoint"
        found = f"over since {-left:.0f} s" if left <= 0 else f"in {left:.0f} s, but {needs}"
        raise ConfigError(f"{written} is {found}; set a later one, or null", key=key)
    return left


@contextmanager
def unchanged_handlers() -> Iterator[None]:
    """Restore the handlers of the signals after the block: Ray sets its own when it starts.

    A default handler is not restored: without one of our own, that of Ray stops Ray.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    on_main = threading.current_thread() is threading.main_thread()
    for number in _OF_ALL if on_main else ():
        if callable(before[number]):
            signal.signal(number, signal.SIG_IGN)  # what is started inherits that
    try:
        yield
    finally:
        for number, handler in before.items():
            ours = callable(handler) and handler is not signal.getsignal(number)
            if ours and on_main:
                signal.signal(number, handler)


class StopRequest:
    """Whether a signal, the deadline or the stop file has asked a run to stop.

    With `trainer.save_on_stop` the step is finished and a checkpoint saved first, which may take
    `trainer.stop_grace_s`.
    """

    merged_s = 0.0  # seconds within which a second signal is the first one, sent again

    def __init__(self, trainer: RunConfig) -> None:
        self.save, self.grace_s = trainer.save_on_stop, trainer.stop_grace_s
        self.file = Path(trainer.stop_file) if trainer.stop_file else None
        left_s = seconds_left(trainer)
        self._end = None if left_s is None else time.monotonic() + left_s
        self._looked, self._longest = time.monotonic(), 0.0
        self.number: int | None = None
        self._within_steps = False
        self._asked_at = -math.inf
        self._timer: threading.Timer | None = None

    @property
    def requested(self) -> bool:
        """Whether the run must stop after the current step."""
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within the block. In another thread than the main one, which alone
        receives signals, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # by `nohup`
        chosen = [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]
        before = {number: signal.signal(number, self._handle) for number in chosen}
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within the block, the first signal lets the current step end."""
        self._within_steps, self._looked = self.save, time.monotonic()
        try:
            yield
        finally:
            self._within_steps = False

    def look(self) -> None:
        """Ask the run to stop after the step that has ended, if the file exists, or if another step
        like the longest one would not leave `grace_s` until the deadline for a checkpoint."""
        now = time.monotonic()
        self._longest, self._looked = max(self._longest, now - self._looked), now
        reason = None
        # A mount that does not answer for a moment is no request, and no end of the run.
        if self.file is not None and os.path.exists(self.file):
            reason = f"trainer.stop_file={self.file} exists"
        elif self._end is not None and now + self._longest + self.grace_s > self._end:
            reason = (
                f"trainer.deadline is in {self._end - now:.0f} s, and a step takes up to "
                f"{self._longest:.0f} s, its checkpoint up to trainer.stop_grace_s={self.grace_s:g}"
            )
        if reason is not None and self.number is None:
            _log.warning("stopping after this step, with a checkpoint: %s", reason)
            self.number = signal.SIGTERM

    def stop_if_requested(self) -> None:
        """Stop the run if a signal has asked for it."""
        if self.number is not None:
            raise KeyboardInterrupt(self.number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if time.monotonic() - self._asked_at < self.merged_s:
            return
        self._asked_at = time.monotonic()
        if number == signal.SIGHUP:
            leave_closed_terminal()
        number = signal.SIGTERM if number in _OF_ALL else number
        if self.number is not None or not self._within_steps:
            raise KeyboardInterrupt(self.number or number)
        self.number = number
        # The second signal comes from a timer if not from the user. It is sent to the main thread,
        # because a signal interrupts the waiting of that thread only which receives it.
        main = threading.get_ident()
        self._timer = threading.Timer(self.grace_s, signal.pthread_kill, (main, number))
        self._timer.daemon = True
        self._timer.start()
        # Not `print`: the signal may have interrupted one, whose buffer is then locked.
        text = "stopping after this step, with a checkpoint; a second signal stops at once"
        os.write(2, f"\n{text} (the latest after {self.grace_s:g} s)\n".encode())
