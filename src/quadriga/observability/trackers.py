"""Trackers receive the metrics of each step. `register_tracker` adds one to the table.

The terminal and `metrics.jsonl` are written in the loop: a row is in the file when its step ends.
Every other tracker runs in a thread of its own, and the run neither waits for it nor ends with it.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from textwrap import indent
from typing import TYPE_CHECKING, Any, Protocol, cast

from quadriga.config.secrets import mask_secrets, mask_values
from quadriga.containment import describe
from quadriga.errors import ConfigError, unknown_name
from quadriga.files import writing
from quadriga.observability.console import RunConsole
from quadriga.observability.jsonl import JsonlFile, JsonObject, read_jsonl, step_of
from quadriga.observability.run_folder import MLFLOW, SWANLAB, WANDB, RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger("quadriga")


class Tracker(Protocol):
    """The interface of a tracker: it receives the metrics of each step, in the order of steps.

    It is made, called and closed in one thread, which is not that of the run (`TrackerThread`).
    One that has a method `log_samples(step, samples)` receives the responses of each validation,
    as rows of `samples.jsonl`, before the metrics of its step.
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
    `trainer.experiment_name`. `settings`: dotted key → value of all settings, with secrets masked.
    """

    folder: RunFolder
    total_steps: int
    title: str = "train"
    first_step: int = 0
    project_name: str = "quadriga"
    experiment_name: str = "run"
    settings: Mapping[str, object] = field(default_factory=dict)


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

    def log_samples(self, step: int, samples: Sequence[JsonObject]) -> None:
        # Indented: Markdown shows it as it is.
        text = "\n\n---\n\n".join(indent(_text_of(one), "    ") for one in samples)
        with writing(self._path):
            self._writer.add_text(VAL_SAMPLES, text, step)

    def close(self) -> None:
        self._writer.close()


class _ServiceTracker:
    """A tracker whose package gives a run with `log` and `finish`, as W&B does."""

    _run: Any
    _table: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[JsonObject]) -> None:
        self._run.log({VAL_SAMPLES: self._table(*_table_of(samples))}, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_ServiceTracker):
    """Logs to the run `trainer.experiment_name` of the project `trainer.project_name`.

    The files of wandb are written under `wandb/` in the run folder. A resumed run of Quadriga
    continues the same run of wandb. Set WANDB_MODE=offline to send nothing.
    """

    def __init__(self, run: RunInfo) -> None:
        import wandb

        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project_name, name=run.experiment_name, config=dict(run.settings),
            id=_run_id(run, WANDB, _new_id), resume="allow", dir=str(run.folder.path),
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )  # fmt: skip


class TrackioTracker(_ServiceTracker):
    """Logs to the run `trainer.experiment_name` of the project `trainer.project_name` in the
    folder TRACKIO_DIR, or where Trackio's other variables say (TRACKIO_SPACE_ID)."""

    def __init__(self, run: RunInfo) -> None:
        import trackio

        self._table = trackio.Table
        self._run = trackio.init(
            run.project_name, run.experiment_name, config=dict(run.settings),
            resume="allow" if run.first_step else "never", embed=False,
        )  # fmt: skip


class SwanlabTracker(_ServiceTracker):
    """Logs to the run `trainer.experiment_name` of the project `trainer.project_name`.

    SWANLAB_MODE says where to: online, offline, or local, for which `swanlab[dashboard]` must be
    installed. The files are under `swanlab/` in the run folder. Online a resumed run continues the
    same run.
    """

    def __init__(self, run: RunInfo) -> None:
        import swanlab

        self._text = swanlab.Text
        self._run = swanlab.init(
            project=run.project_name, name=run.experiment_name, config=dict(run.settings),
            id=_run_id(run, SWANLAB, _new_id), resume="allow",
            log_dir=str(run.folder.path / SWANLAB),
            settings={"terminal": {"proxy_type": "none"}, "interactive": False},
        )  # fmt: skip

    def log_samples(self, step: int, samples: Sequence[JsonObject]) -> None:
        texts = [self._text(_text_of(one), caption=f"reward {one['reward']:g}") for one in samples]
        self._run.log({VAL_SAMPLES: texts}, step=step)


class MlflowTracker:
    """Logs to a run `trainer.experiment_name` of the experiment `trainer.project_name`.

    Without MLFLOW_TRACKING_URI its store is `mlflow/mlflow.db` in the run folder. A resumed run of
    Quadriga continues the same run of MLflow. A character that MLflow allows in no name, such as
    the @ of `pass@4`, becomes `_`.
    """

    def __init__(self, run: RunInfo) -> None:
        import mlflow

        self._entities = mlflow.entities
        folder = run.folder.path / MLFLOW
        own = not mlflow.is_tracking_uri_set()
        with writing(folder):
            folder.mkdir(exist_ok=True)
        self._client = client = mlflow.MlflowClient(
            f"sqlite:///{folder}/mlflow.db" if own else None
        )
        found = client.get_experiment_by_name(run.project_name)
        if found is None:
            place = (folder / "artifacts").as_uri() if own else None
            experiment = client.create_experiment(run.project_name, artifact_location=place)
        else:
            experiment = found.experiment_id

        def begin() -> str:
            new = client.create_run(experiment, run_name=run.experiment_name).info.run_id
            params = [
                mlflow.entities.Param(_MLFLOW.sub("_", key), f"{value}"[:6000])
                for key, value in run.settings.items()
            ]
            for start in range(0, len(params), 100):  # MLflow's limit of a call
                client.log_batch(new, params=params[start : start + 100])
            return str(new)

        self._id = _run_id(run, MLFLOW, begin)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id,
            metrics=[
                self._entities.Metric(_MLFLOW.sub("_", name), value, now, step)
                for name, value in metrics.items()
            ],
        )

    def log_samples(self, step: int, samples: Sequence[JsonObject]) -> None:
        columns, rows = _table_of(samples)
        table = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
        self._client.log_table(self._id, table, f"{VAL_SAMPLES}/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


VAL_SAMPLES = "val_samples"
_RUN_ID = "run_id.txt"
_MLFLOW = re.compile(r"[^\w./ :-]")
_COLUMNS = ("step", "prompt", "response", "reward", "ground_truth", "data_source")


def _table_of(samples: Sequence[JsonObject]) -> tuple[list[str], list[list[float | str]]]:
    """Return columns and rows: steps and rewards as numbers, all others as texts."""
    rows = [[sample[name] for name in _COLUMNS] for sample in samples]
    texts = [[x if isinstance(x, int | float) else str(x) for x in row] for row in rows]
    return list(_COLUMNS), texts


def _text_of(sample: JsonObject) -> str:
    return "{prompt}\n\n{response}\n\nreward {reward:g}".format(**sample)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _run_id(run: RunInfo, service: str, begin: Callable[[], str]) -> str:
    """Return the id, in a service, of the run that this one continues, or of a new run. Keep it in
    the folder of the service."""
    file = run.folder.path / service / _RUN_ID
    if run.first_step and file.exists():
        return file.read_text(encoding="ascii").strip()
    new = begin()
    with writing(file):
        file.parent.mkdir(exist_ok=True)
        file.write_text(new, encoding="ascii")
    return new


TrackerFactory = Callable[[RunInfo], Tracker]

TRACKERS: dict[str, TrackerFactory] = {
    "console": lambda run: RunConsole(run.total_steps, title=run.title),
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
    "swanlab": SwanlabTracker,
}
SERVICES = ("wandb", "mlflow", "trackio", "swanlab")
"""Trackers with a package of their name, each an extra of Quadriga."""


IN_THE_LOOP = ("console", "jsonl")
"""Trackers that the run waits for, and whose errors end it."""


def register_tracker(name: str, factory: TrackerFactory) -> None:
    """Add a tracker for `trainer.loggers`. Raises `ValueError` if the name is already in use."""
    if name in TRACKERS:
        raise ValueError(f"a tracker named {name!r} exists already")
    TRACKERS[name] = factory


def check_trackers(names: Iterable[str]) -> None:
    """Raise `UnknownNameError` for an unknown name; the message names the nearest known one."""
    for name in {*names} - {*TRACKERS}:
        raise unknown_name("tracker for trainer.loggers", name, sorted(TRACKERS))


def check_packages(names: Iterable[str]) -> None:
    """Raise `ConfigError` for the first tracker whose package is not installed."""
    for name in {*SERVICES} & {*names}:
        if importlib.util.find_spec(name) is None:
            told = f"trainer.loggers: the package {name} is not installed; run pip install"
            raise ConfigError(f"{told} 'quadriga[{name}]'", key="trainer.loggers")


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
        self._pass_on(f"the row of step {step}", "log", step, metrics)

    def log_samples(self, step: int, samples: Sequence[JsonObject]) -> None:
        """Pass on the responses of a validation, unless the tracker is dropped or takes none."""
        self._pass_on(f"the samples of step {step}", "log_samples", step, samples)

    def _pass_on(self, what: str, method: str, *given: object) -> None:
        if not self._dropped:
            self._drop_if_failed(late_s=self._timeout_s)
        call = None if self._dropped else getattr(self._tracker, method, None)
        if call is not None:
            self._submit(what, partial(call, *given))

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

    def log_samples(self, step: int, samples: Iterable[JsonObject]) -> None:
        """Pass the responses of a validation to the trackers that take them."""
        masked = [mask_values(sample) for sample in samples]
        for tracker in self._trackers if masked else ():
            if isinstance(tracker, TrackerThread):
                tracker.log_samples(step, masked)

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
