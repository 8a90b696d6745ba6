"""The learning curve of a run as one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.observability.jsonl import cannot_write, read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = tuple[list[float], list[float]]
CURVES = {
    "reward/mean": ("training reward", "#3b6ea5", ""),
    "val/accuracy": ("held-out accuracy", "#c8553d", "o"),
}


def plot_learning_curve(
    metrics: str | Path, picture: str | Path, *, title: str = "", mean_of: int = 5
) -> bool:
    """Draw reward and held-out accuracy over steps from a `metrics.jsonl` into a PNG.

    The reward is drawn faintly as it came and strongly as a mean over `mean_of` steps. Returns
    False, and draws nothing, where the file holds neither. Raises `InputError` when the picture
    cannot be written and `DataError` when the metrics cannot be read.
    """
    rows = list(read_jsonl(metrics))
    curves = {name: points_of(rows, name) for name in CURVES}
    if not any(steps for steps, _ in curves.values()):
        return False
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


def points_of(rows: Iterable[Mapping[str, Any]], name: str) -> Points:
    """(steps, values) of one metric; rows without it, or where it is no number, are left out."""
    pairs = [
        (float(row["step"]), float(row[name]))
        for row in rows
        if "step" in row and isinstance(row.get(name), int | float)
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: list[float], width: int) -> list[float]:
    """The mean of each value and up to `width - 1` before it."""
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
