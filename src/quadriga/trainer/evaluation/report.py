"""The report of an evaluation: a table, a JSON object and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from quadriga.config.secrets import mask_secrets
from quadriga.errors import DataError
from quadriga.observability.jsonl import JsonObject, cannot_write
from quadriga.trainer.validation import OVERALL, SourceSummary, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#3b6ea5", "#c8553d", "#5b8c5a", "#8e6c8a", "#b08d2f", "#4f9da6")


def results_of(summaries: Sequence[SourceSummary]) -> dict[str, object]:
    """Return the summaries as JSON values."""
    return {
        "sources": [
            {
                "data_source": summary.data_source,
                "prompts": summary.prompts,
                "responses": summary.responses,
                "metrics": {name: asdict(value) for name, value in summary.metrics.items()},
            }
            for summary in summaries
        ]
    }


def read_results(path: Path) -> JsonObject:
    """Return the JSON object of a report. Raises `DataError` if the file is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}", path=str(path)) from None
    if not isinstance(value, dict):
        raise DataError(f"{path} holds no JSON object", path=str(path))
    return value


def summary_table(summaries: Sequence[SourceSummary], confidence: float) -> Table:
    """Return a table with one row for each metric of each data source."""
    table = Table(title="evaluation", title_justify="left")
    for heading in ("data source", "prompts", "metric", "value", f"{confidence:.0%} interval"):
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    for summary in summaries:
        for number, (name, estimate) in enumerate(summary.metrics.items()):
            head = (mask_secrets(summary.data_source), str(summary.prompts))
            cells = (name, f"{estimate.value:.3f}", interval(estimate))
            table.add_row(*(head if number == 0 else ("", "")), *cells)
        table.add_section()
    return table


_LEFT = ("data source", "metric")


def plot_results(summaries: Sequence[SourceSummary], picture: Path) -> None:
    """Plot pass@k over k for each data source, with intervals; with one response the means.

    Raises:
        InputError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    # `Figure` and not `pyplot`: it needs no display and keeps no global list of open figures.
    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    if sum(name.startswith("pass@") for name in summaries[0].metrics) > 1:
        _plot_curves(axes, summaries)
    else:
        _plot_means(axes, summaries)
    axes.grid(alpha=0.25)
    try:
        figure.savefig(str(picture), format="png")
    except OSError as error:
        raise cannot_write(picture, error) from error


def _plot_curves(axes: Axes, summaries: Sequence[SourceSummary]) -> None:
    for number, summary in enumerate(summaries):
        points = [
            (int(name.partition("@")[2]), estimate)
            for name, estimate in summary.metrics.items()
            if name.startswith("pass@")
        ]
        ks = [k for k, _ in points]
        colour = "black" if summary.data_source == OVERALL else _COLOURS[number % len(_COLOURS)]
        values = [estimate.value for _, estimate in points]
        axes.plot(ks, values, marker="o", markersize=4, color=colour, label=summary.data_source)
        lows = [e.value if e.low is None else e.low for _, e in points]
        highs = [e.value if e.high is None else e.high for _, e in points]
        axes.fill_between(ks, lows, highs, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_xlabel("k")
    axes.set_ylabel("pass@k")
    axes.legend(frameon=False)


def _plot_means(axes: Axes, summaries: Sequence[SourceSummary]) -> None:
    for number, summary in enumerate(summaries):
        estimate = next(iter(summary.metrics.values()))
        low = estimate.value if estimate.low is None else estimate.low
        high = estimate.value if estimate.high is None else estimate.high
        axes.errorbar(
            [number],
            [estimate.value],
            yerr=[[estimate.value - low], [high - estimate.value]],
            marker="o",
            capsize=4,
            color=_COLOURS[0],
        )
    axes.set_xticks(range(len(summaries)), [summary.data_source for summary in summaries])
    axes.set_ylabel("mean score")
