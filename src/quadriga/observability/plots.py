"""Plot the learning curve of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.files import cannot_write
from quadriga.observability.jsonl import JsonObject, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[list[float], list[float]]
CURVES = {
    "reward/mean": ("training reward", "#3b6ea5", ""),
    "rm/loss": ("training loss", "#3b6ea5", ""),
    "val/loss": ("validation loss", "#7a9a3b", "o"),
    "val/accuracy": ("validation accuracy", "#c8553d", "o"),
    "val/score": ("validation score", "#c8553d", "o"),
}


def plot_learning_curve(
    metrics: str | Path, picture: str | Path, *, title: str = "", mean_of: int = 5
) -> bool:
    """Plot training reward and validation score over steps, from `metrics.jsonl` to a PNG.

    The reward is drawn twice: as measured, in a light line, and as the running mean over `mean_of`
    steps. The score is called an accuracy if it is one at every validation of the run
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
            _draw(axes, name, points, mean_of)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    try:
        figure.savefig(str(picture), format="png")
    except OSError as error:
        raise cannot_write(Path(picture), error) from error
    return True


def points_of(rows: Iterable[JsonObject], name: str) -> Points:
    """Return (steps, values) of one metric; rows without a number for it are skipped."""
    pairs = [
        (float(row["step"]), float(row[name]))
        for row in rows
        if "step" in row and isinstance(row.get(name), int | float)
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of each value and up to `width - 1` values before it.

    [1, 3, 5] with width 2 → [1, (1 + 3) / 2, (3 + 5) / 2] = [1, 2, 4].
    """
    return [
        sum(part) / len(part)
        for part in (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    ]


def _draw(axes: Axes, name: str, points: Points, mean_of: int) -> None:
    label, colour, marker = CURVES[name]
    steps, values = points
    if marker:
        axes.plot(steps, values, color=colour, marker=marker, markersize=4, label=label)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(steps, running_mean(values, mean_of), color=colour, label=label)
