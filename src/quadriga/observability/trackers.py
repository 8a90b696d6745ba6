"""Trackers receive the metrics of each step. `register_tracker` adds one to the table.

The terminal and `metrics.jsonl` are written in the loop: a row is in the file when its step ends.
Every other tracker runs in a thread of its own, and the run neither waits for it nor ends with it.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, cast

from quadriga.config.secrets import mask_secrets
from quadriga.containment import describe
from quadriga.errors import ConfigError, unknown_name
from quadriga.files import writing
from quadriga.observability.console import RunConsole
from quadriga.observability.jsonl import JsonlFile, JsonObject, read_jsonl, step_of
from quadriga.observability.run_folder import WANDB, RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WANDB_RUN_ID = "run_id.txt"
_log = logging.getLogger("quadriga")


class Tracker(Protocol):
    """The interface of a tracker: it receives the metrics of each step, in the order of steps.

    It is made, called and closed in one thread, which is not that of the run (`TrackerThread`).
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write or show the metrics of a step. The run goes on without a tracker that raises."""
        ...

    def close(self) -> None:
        """Write buffered metrics. `log` is not called afterwards; a second `close` does nothing."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run. `first_step` is above 0 if the run is resumed.

    `project_name` and `experiment_name` are the settings `trainer.project_name` and
    `trainer.experiment_name`.
    """

    folder: RunFolder
    total_steps: int
    title: str = "train"
    first_step: int = 0
    project_name: str = "quadriga"
    experiment_name: str = "run"


class JsonlTracker:
    """Writes `metrics.jsonl`: one object per step, with `step` as its first key."""

    def __init__(self, run: RunInfo) -> None:
        self._file = JsonlFile(run.folder.metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write({"step": step, **metrics})

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Writes TensorBoard events under `tensorboard/`. Imports torch when it is created."""

    def __init__(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = run.folder.tensorboard
        # Events of later steps, which the interrupted run wrote, would otherwise show as a second
        # curve: `purge_step` makes TensorBoard ignore them.
        purge = run.first_step + 1 if run.first_step else None
        with writing(self._path):
            self._writer = SummaryWriter(str(self._path), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with writing(self._path):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to the run `trainer.experiment_name` of the project `trainer.project_name`.

    The files of wandb are written under `wandb/` in the run folder. A resumed run of Quadriga
    continues the same run of wandb. Set WANDB_MODE=offline to send nothing.
    """

    def __init__(self, run: RunInfo) -> None:
        import wandb

        folder = run.folder.path / WANDB
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            id=_wandb_run_id(folder, resumed=run.first_step > 0),
            resume="allow",
            dir=str(run.folder.path),
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_run_id(folder: Path, *, resumed: bool) -> str:
    """Return the id of the run that this one continues, or of a new run. Keep it on disk."""
    file = folder / _WANDB_RUN_ID
    with writing(file):
        if resumed and file.exists():
            return file.read_text(encoding="ascii").strip()
        new = uuid.uuid4().hex[:12]
        folder.mkdir(exist_ok=True)
        file.write_text(new, encoding="ascii")
        return new


TrackerFactory = Callable[[RunInfo], Tracker]

TRACKERS: dict[str, TrackerFactory] = {
    "console": lambda run: RunConsole(run.total_steps, title=run.title),
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}


IN_THE_LOOP = ("console", "jsonl")
"""Trackers that the run waits for, and whose errors end it."""


def register_tracker(name: str, factory: TrackerFactory) -> None:
    """Add a tracker for `trainer.loggers`. Raises `ValueError` if the name is already in use."""
    if name in TRACKERS:
        raise ValueError(f"a tracker named {name!r} exists already")
    TRACKERS[name] = factory


def check_trackers(names: Iterable[str]) -> None:
    """Raise `UnknownNameError` for the first unknown name; the message names the nearest one.

    Raises `ConfigError` for a tracker whose package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker for trainer.loggers", name, sorted(TRACKERS))
        if name == "wandb" and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "trainer.loggers contains 'wandb', but the package wandb is not installed; "
                "run pip install 'quadriga[wandb]'"
            )


class TrackerThread:
    """A tracker in a thread of its own.

    consumes      rows, in the order in which they are logged
    waits for     in `log` nothing; when it is made and closed, `timeout_s` seconds at most
    unblocked by  the return of each method of the tracker

    A tracker that raises is dropped, and one that has not started, or taken a row, `timeout_s`
    seconds after it was asked to: a warning names it, and the run goes on without it.

    Raises `ConfigError` and `ImportError` of a tracker that is made, because no later start would
    do better, and `ConfigError` for an object without the methods of a tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._calls: SimpleQueue[tuple[Future[Tracker | None], Callable[[], Tracker | None]] | None]
        self._calls = SimpleQueue()
        # What is being called and what waits for it: when it was asked for, and its name.
        self._pending: deque[tuple[float, str, Future[Tracker | None]]] = deque()
        self._dropped = self._closed = False
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()
        made = self._submit("its start", make)
        wait([made], timeout_s)
        error = made.exception() if made.done() else None
        if isinstance(error, ConfigError | ImportError):
            raise error
        self._drop_if_failed(late_s=0.0)
        if self._dropped:
            self._closed = True
            return self._calls.put(None)
        tracker = made.result()
        if not all(callable(getattr(tracker, method, None)) for method in ("log", "close")):
            raise ConfigError(
                f"trainer.loggers: {name} must have methods log(step, metrics) and close(); its "
                f"factory returned {tracker!r:.80}",
                key="trainer.loggers",
            )
        self._tracker = cast(Tracker, tracker)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step, unless the tracker is dropped."""
        if not self._dropped:
            self._drop_if_failed(late_s=self._timeout_s)
        if not self._dropped:
            self._submit(f"the row of step {step}", partial(self._tracker.log, step, metrics))

    def close(self) -> None:
        """Close the tracker when it has taken all rows. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._drop_if_failed(late_s=self._timeout_s)
        if not (self._dropped and self._pending):  # it hangs
            last = self._submit("its end", self._tracker.close)
            self._calls.put(None)
            wait([last], self._timeout_s)
            self._drop_if_failed(late_s=0.0)

    def _submit(self, what: str, call: Callable[[], Tracker | None]) -> Future[Tracker | None]:
        future: Future[Tracker | None] = Future()
        self._pending.append((time.monotonic(), what, future))
        self._calls.put((future, call))
        return future

    def _work(self) -> None:
        for future, call in iter(self._calls.get, None):
            try:
                future.set_result(call())
            except BaseException as error:  # also `sys.exit` in code of the user
                future.set_exception(error)

    def _drop_if_failed(self, late_s: float) -> None:
        """Drop the tracker if a call has failed, or the first of those that are left is late."""
        while self._pending:
            since, what, future = self._pending[0]
            late = time.monotonic() - since > late_s
            # The clock goes on while the process is stopped: the tracker gets a second beyond it.
            if late and not wait([future], min(1.0, self._timeout_s)).done:
                return self._drop(f"{what} is not done after {self._timeout_s:g} s")
            if not future.done():
                return None
            self._pending.popleft()
            if (error := future.exception()) is not None:
                self._drop(f"{what} failed: {describe(error)}")
        return None

    def _drop(self, why: str) -> None:
        if not self._dropped:
            _log.warning("the tracker %s gets no more metrics: %s", self._name, mask_secrets(why))
        self._dropped = True


class Trackers:
    """All trackers of a run. `console` is the one that writes to the terminal, or None."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self.console = next((t for t in trackers if isinstance(t, RunConsole)), None)

    @classmethod
    def open(cls, names: Iterable[str], run: RunInfo, timeout_s: float = 60.0) -> Trackers:
        """Create the trackers with these names. Raises `UnknownNameError` before it creates any.

        If one cannot be created, those before it are closed.

        Args:
            timeout_s: of the trackers beside the loop, see `TrackerThread`.
        """
        names = list(dict.fromkeys(names))
        check_trackers(names)
        run = replace(
            run,
            title=mask_secrets(run.title),
            project_name=mask_secrets(run.project_name),
            experiment_name=mask_secrets(run.experiment_name),
        )
        with ExitStack() as started:
            trackers: list[Tracker] = []
            for name in names:
                make = partial(TRACKERS[name], run)
                in_loop = name in IN_THE_LOOP
                trackers.append(make() if in_loop else TrackerThread(name, make, timeout_s))
                started.callback(trackers[-1].close)
            started.pop_all()
        return cls(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to every tracker, with secrets masked in their names.

        The names of some metrics come from code of the user, such as `reward/extra/*`.
        """
        metrics = {mask_secrets(name): value for name, value in metrics.items()}
        for tracker in self._trackers:
            tracker.log(step, dict(metrics))

    def close(self) -> None:
        """Close every tracker before an error of one is raised."""
        trackers, self._trackers = self._trackers, []
        with ExitStack() as stack:  # which calls the last callback first
            for tracker in reversed(trackers):
                stack.callback(tracker.close)


Points = tuple[list[float], list[float]]
CURVES = {
    "reward/mean": ("training reward", "#3b6ea5", ""),
    "rm/loss": ("training loss", "#3b6ea5", ""),
    "val/loss": ("validation loss", "#7a9a3b", "o"),
    "val/accuracy": ("validation accuracy", "#c8553d", "o"),
    "val/score": ("validation score", "#c8553d", "o"),
}


MEAN_OF = 5
"""Steps over which the running mean of a reward is taken."""


def plot_learning_curve(metrics: str | Path, picture: str | Path, *, title: str = "") -> bool:
    """Plot training reward and validation score over steps, from `metrics.jsonl` to a PNG.

    The reward is drawn twice: as measured, in a light line, and as the running mean over
    `MEAN_OF` steps. The score is called an accuracy if it is one at every validation of the run
    (`val/accuracy`). Return False and write no file if the metrics hold neither curve. Raises
    `InputError` if the picture cannot be written and `DataError` if the metrics cannot be read.
    """
    rows = list(read_jsonl(metrics))
    curves = {name: points_of(rows, name) for name in CURVES}
    scored, accurate = (set(curves[name][0]) for name in ("val/score", "val/accuracy"))
    curves.pop("val/score" if scored <= accurate else "val/accuracy")
    if not any(steps for steps, _ in curves.values()):
        return False
    # `Figure` and not `pyplot`: it needs no display and keeps no global list of open figures.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        if points[0]:
            _draw(axes, name, points)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with writing(Path(picture)):
        figure.savefig(str(picture), format="png")
    return True


def points_of(rows: Iterable[JsonObject], name: str) -> Points:
    """Return (steps, values) of one metric; rows without a number for it are skipped."""
    pairs = [
        (float(step_of(row)), float(row[name]))
        for row in rows
        if "step" in row and isinstance(row.get(name), int | float)
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _draw(axes: Axes, name: str, points: Points) -> None:
    label, colour, marker = CURVES[name]
    steps, values = points
    if marker:
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    # [1, 3, 5] over 2 steps: 1, (1 + 3) / 2, (3 + 5) / 2
    parts = [values[max(0, end - MEAN_OF) : end] for end in range(1, len(values) + 1)]
    axes.plot(steps, [sum(part) / len(part) for part in parts], color=colour, label=label)
