"""Callbacks: code of the user that is told what happens in a run, and can change its course.

    on_start(run)                               the run begins or is resumed, its ranks are started
    on_step(run, step, metrics, samples)        a step is done, before its validation and checkpoint
    on_validation(run, step, metrics, samples)  a validation is done; before step 1 it is step 0
    on_save(step, folder)                       a checkpoint is complete
    on_end(run, error)                          the run ends; `error` is None if nothing has failed

A callback is an object with some of these methods, or a file with functions of these names. Each is
given by name what it has parameters for. All are called in the controller, in the thread of the
loop, which waits for them.

The run can be changed in `on_start`, `on_step` and `on_validation`. Changes take effect when all
callbacks of the event have returned. They are kept: a step that is done again after a loss is not
told again, and its changes are made again.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from quadriga.containment import import_file, reported
from quadriga.errors import CallbackError, InputError, WorkerError, first_line, nearest_name
from quadriga.observability.metrics import is_of_runs

if TYPE_CHECKING:
    from quadriga.observability.jsonl import JsonObject

_log = logging.getLogger("quadriga")

_STEP = ("run", "step", "metrics", "samples")
EVENTS = {
    "on_start": ("run",),
    "on_step": _STEP,
    "on_validation": _STEP,
    "on_save": ("run", "step", "folder"),
    "on_end": ("run", "error"),
}
"""Method of a callback → what it can be given, by name."""
SCALE_LR = "scale_lr"
"""The method of a worker that changes its learning rate."""


def callback_file(given: str) -> Path:
    """Return the file of `mine.py` or `mine.py:Name`."""
    return Path(given.rpartition(":")[0] if ".py:" in given else given)


def load_callbacks(given: Iterable[object]) -> list[tuple[str, object]]:
    """Return (name for messages, object) of callbacks: objects, classes that are made here, files
    `mine.py` whose functions are called, and `mine.py:Name` for a class in a file.

    Raises:
        InputError: one cannot be made, has no method of a callback, a misspelt one, a coroutine, or
            one with a parameter that it is never given.
    """
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise InputError(f"callbacks: expected a list, got {given!r}")
    found = []
    for one in given:
        owner, name = one, getattr(one, "__name__", type(one).__name__)
        name = getattr(one, "__file__", name)  # of a module
        if isinstance(one, str | Path):
            file, name = callback_file(str(one)), str(one)
            owner = module = import_file(file, "callback file")
            if str(one) != str(file):
                owner = getattr(module, str(one).rpartition(":")[2], None)
        if isinstance(owner, type):
            with reported(partial(_cannot_be_made, name)):
                owner = owner()
        _check(name, owner)
        found.append((name, owner))
    return found


def _cannot_be_made(name: str, why: str) -> InputError:
    return InputError(f"callback {name} cannot be made without arguments: {why}; pass an object")


def _check(name: str, owner: object) -> None:
    methods = {name: getattr(owner, name) for name in dir(owner) if name.startswith("on_")}
    for method, function in methods.items():
        if method not in EVENTS:
            near = nearest_name(method, EVENTS)
            hint = f"did you mean {near}?" if near else "rename it"
            raise InputError(f"callback {name}: no event {method}; {hint}")
        if inspect.iscoroutinefunction(function):
            raise InputError(f"callback {name}: {method} must be a function without async")
        try:
            inspect.signature(function).bind(**_taken(function, dict.fromkeys(EVENTS[method])))
        except TypeError as error:
            offered = ", ".join(EVENTS[method])
            raise InputError(f"callback {name}: {method} is given {offered}: {error}") from None
    if not methods:
        values = vars(owner) if isinstance(owner, ModuleType) else {}
        has = [n for n, value in values.items() if isinstance(value, type)]
        hint = f"; for a class in it, write {name}:{has[-1]}" if has else ""
        raise InputError(f"callback {name} has none of {', '.join(EVENTS)}{hint}")


def _taken(function: Callable[..., object], offered: Mapping[str, object]) -> dict[str, object]:
    """Return what a function has parameters for."""
    parameters = inspect.signature(function).parameters
    every = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in offered.items() if every or name in parameters}


class CurrentStep(Protocol):
    """The metrics of the current step: `RunRecord`."""

    @property
    def row(self) -> Mapping[str, float]:
        """Return them."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add some."""


class RunControl:
    """The run as a callback sees it.

    Attributes:
        folder: the run folder.
        step: the last step that was done, 0 before the first one.
        total_steps: of the whole run.
    """

    def __init__(self, folder: Path, total_steps: int, step: int, callbacks: Callbacks) -> None:
        self.folder, self.total_steps, self.step = folder, total_steps, step
        self._callbacks = callbacks

    def stop(self) -> None:
        """End the run after this step, as if it were the last one: it validates, saves, and exports
        the model. A resumed run goes on."""
        self._callbacks.change(partial(setattr, self._callbacks, "stopped_at", self.step))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the row of the step. Names in it are refused, and those of the run itself,
        which may log them later in the step."""
        numbers = {str(name): float(value) for name, value in metrics.items()}
        existing = self._callbacks.current.row.keys() | self._callbacks.logged
        if taken := sorted(numbers.keys() & existing):
            raise ValueError(f"log(): the row of the step has {taken[0]} already; choose another")
        if taken := sorted(filter(is_of_runs, numbers)):
            raise ValueError(f"log(): {taken[0]} is a metric of the run; choose another name")
        self._callbacks.logged |= numbers.keys()
        self._callbacks.change(lambda: self._callbacks.current.add(numbers))

    def scale_lr(self, factor: float, role: str | None = None) -> None:
        """From the next step on, train with `factor` × the learning rate of the schedule.

        A checkpoint keeps the factor, and a second call replaces it: factors are not multiplied.

        Args:
            role: "actor" or "critic"; None: all models that are trained.
        """
        groups = self._callbacks.groups
        if role is not None and role not in groups:
            raise ValueError(
                f"scale_lr(): no role {role!r} is trained; there are {', '.join(groups)}"
            )
        if not 0 <= factor < float("inf"):
            raise ValueError(f"scale_lr(): expected a factor from 0, got {factor}")

        def change() -> None:
            for key, group in self._callbacks.groups.items():
                if role in (None, key) and hasattr(group, SCALE_LR):
                    getattr(group, SCALE_LR)(float(factor))

        self._callbacks.change(change)


class Callbacks:
    """The callbacks of a run.

    Attributes:
        groups: role → worker group of the models that are trained, of this attempt.
        current: the metrics of the step.
        stopped_at: the step at which a callback has stopped the run.
        logged: names of the metrics that the callbacks of the event have logged.
    """

    def __init__(self, given: Iterable[object] = ()) -> None:
        self._owners = load_callbacks(given)
        self.groups: Mapping[str, Any] = {}
        self.current: CurrentStep
        self.stopped_at: int | None = None
        self.logged: set[str] = set()
        self._run: RunControl | None = None
        self._begun_at = 0
        # What has been told, and which changes were made then.
        self._told: dict[tuple[str, int], list[Callable[[], object]]] = {}
        self._changes: list[Callable[[], object]] | None = None
        self._failed = False

    def stopped(self, step: int) -> bool:
        """Whether the run ends after this step."""
        return self.stopped_at is not None and step >= self.stopped_at

    def change(self, change: Callable[[], object]) -> None:
        """Make a change when all callbacks of the event have returned."""
        if self._changes is None:
            events = ", ".join(list(EVENTS)[:3])
            raise RuntimeError(f"the run can be changed in {events} only")
        self._changes.append(change)

    def begin(self, folder: Path, total_steps: int, step: int, current: CurrentStep) -> None:
        """Tell that the run begins after `step`. After a loss, it goes on from there."""
        self.current = current
        if self._run is None:
            self._run, self._begun_at = RunControl(folder, total_steps, step, self), step
        self._run.step = step
        if step == self._begun_at:
            self._tell("on_start", step)

    def step(self, step: int, samples: Sequence[JsonObject]) -> None:
        """Tell that a step is done."""
        assert self._run is not None
        self._run.step = step
        self._tell("on_step", step, metrics=self.current.row, samples=samples)

    def validation(self, step: int, samples: Sequence[JsonObject]) -> None:
        """Tell that a validation is done."""
        found = {name: value for name, value in self.current.row.items() if name.startswith("val")}
        self._tell("on_validation", step, metrics=found, samples=samples)

    def saved(self, folder: Path) -> None:
        """Tell that a checkpoint is complete."""
        self._tell("on_save", int(folder.name.rpartition("_")[2]), folder=folder)

    def end(self, error: BaseException | None) -> None:
        """Tell all callbacks that the run ends. The first error is raised, unless it is `error`;
        the callbacks after it are given it, and later errors are logged."""
        if self._run is None:
            return
        first, self._changes = error, None
        for name, owner in self._owners:
            try:
                self._call(name, owner, "on_end", self._run.step, run=self._run, error=first)
            except CallbackError as failed:
                if first is not None:
                    _log.warning("%s", first_line(failed))
                first = first or failed
        if first is not None and first is not error:
            raise first

    def _tell(self, event: str, step: int, **given: object) -> None:
        """Call the methods of an event, or make its changes again if it was told already."""
        told = self._told.get((event, step))
        if told is None and not self._failed:
            offered = {"run": self._run, "step": step, **given}
            told = self._told[event, step] = []
            self._changes, self.logged = (None if event == "on_save" else told), set()
            for name, owner in self._owners:
                self._call(name, owner, event, step, **{key: offered[key] for key in EVENTS[event]})
            self._changes = None
        for change in told or ():
            change()

    def _call(self, called: str, owner: object, event: str, at: int, **offered: object) -> None:
        """Call the method of an event, if a callback has it."""
        if (method := getattr(owner, event, None)) is not None:
            with self._named(called, event, at):
                method(**_taken(method, offered))

    @contextmanager
    def _named(self, name: str, event: str, step: int) -> Iterator[None]:
        """Raise `CallbackError` of what a callback raises, and call no other one but `on_end`. The
        loss of a rank passes."""
        where = f"callback {name}: {event} at step {step}"
        try:
            with reported(lambda why: CallbackError(f"{where}: {why}"), WorkerError):
                yield
        except CallbackError as error:
            self._failed, self._changes = True, None
            frames = "".join(traceback.format_tb(getattr(error.__cause__, "__traceback__", None)))
            details = {"callback": name, "event": event, "step": step, "remote_traceback": frames}
            error.__dict__.update(details)
            raise
