"""The figures of a run: slopes over ranks, goals, and the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

RAW_CALL = "raw Ray, empty call"
CALLS = (RAW_CALL, "empty call", "by-reference call", "permuted rows")
RAW_PUT = "raw ray.put, four fields"
RAW_PUT_AND_CALL = "raw ray.put and call, four fields"
Seconds = Mapping[str, Mapping[int, float]]
"""step → ranks → CPU seconds of the controller."""
FROM_RANKS = 64
"""Slopes are fitted from this number of ranks on; below it the fixed cost of a call dominates."""
AT_RANKS = 1024
"""Goals hold at this number of ranks, or at the largest below it."""


def us_per_rank(seconds: Seconds) -> dict[str, dict[int, float]]:
    """Return microseconds per rank for each step and number of ranks."""
    return {
        step: {ranks: round(s / ranks * 1e6, 2) for ranks, s in by_ranks.items()}
        for step, by_ranks in seconds.items()
    }


def slopes(seconds: Seconds) -> dict[str, float]:
    """Return for each step the exponent p of cost ~ ranks^p: 1 is linear, 2 is quadratic.

    The exponent is the slope of a least-squares line through (log ranks, log seconds).
    """
    found = {}
    for step, by_ranks in seconds.items():
        points = [(math.log(n), math.log(s)) for n, s in by_ranks.items() if n >= FROM_RANKS and s]
        if len(points) > 1:
            mean_x = sum(x for x, _ in points) / len(points)
            mean_y = sum(y for _, y in points) / len(points)
            covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
            found[step] = round(covariance / sum((x - mean_x) ** 2 for x, _ in points), 2)
    return found


def goals(seconds: Seconds) -> dict[str, dict[str, object]]:
    """Return {figure: {"value", "goal", "met"}}."""
    found: dict[str, dict[str, object]] = {}
    _ratio(found, seconds, "empty call", RAW_CALL, None)
    _ratio(found, seconds, "by-reference call", RAW_CALL, 2.0)
    _ratio(found, seconds, "permuted rows", RAW_CALL, 3.0)
    _ratio(found, seconds, "four local fields", RAW_PUT, None)
    _ratio(found, seconds, "four local fields", RAW_PUT_AND_CALL, 1.2)
    sweep = seconds.get("watcher sweep", {})
    if sweep:
        ranks = _largest(sweep)
        _add(found, f"watcher sweep at {ranks} ranks, ms", sweep[ranks] * 1000, 20.0)
    for step, slope in slopes(seconds).items():
        _add(found, f"{step}: exponent over ranks", slope, 1.25)
    return found


def _largest(by_ranks: Mapping[int, float]) -> int:
    return max([n for n in by_ranks if n <= AT_RANKS], default=min(by_ranks))


def _ratio(
    found: dict[str, dict[str, object]],
    seconds: Seconds,
    step: str,
    base: str,
    goal: float | None,
) -> None:
    common = {n: s for n, s in seconds.get(step, {}).items() if n in seconds.get(base, {})}
    if common:
        ranks = _largest(common)
        ratio = common[ranks] / max(seconds[base][ranks], 1e-9)
        _add(found, f"{step} / {base}, at {ranks} ranks", ratio, goal)


def _add(found: dict[str, dict[str, object]], name: str, value: float, goal: float | None) -> None:
    met = goal is None or value <= goal
    shown = "reported" if goal is None else f"at most {goal:g}"
    found[name] = {"value": round(value, 3), "goal": shown, "met": met}


def plot(seconds: Seconds, path: Path) -> None:
    """Draw microseconds per rank over ranks: calls on the left, the rest on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import ScalarFormatter

    per_rank = us_per_rank(seconds)
    calls = [step for step in CALLS if step in per_rank]
    rest = [step for step in per_rank if step not in calls]
    figure, axes = plt.subplots(1, 2, figsize=(12, 5.6), constrained_layout=True)
    panels = [("Calls of a group", calls), ("Futures, local fields, placement, watching", rest)]
    for axis, (title, steps) in zip(axes, panels, strict=True):
        for step in steps:
            ranks = sorted(per_rank[step])
            style = "--" if step.startswith("raw") else "-"
            axis.plot(ranks, [per_rank[step][n] for n in ranks], style, marker="o", label=step)
        axis.set_xscale("log", base=2)
        ticks = sorted({n for step in per_rank.values() for n in step})
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.minorticks_off()
        axis.set_title(title)
        axis.set_xlabel("ranks")
        axis.grid(alpha=0.3)
        if steps:
            axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_formatter(ScalarFormatter())
    axes[0].set_ylabel("CPU time of the controller per rank, µs")
    figure.savefig(path, dpi=120)
    plt.close(figure)
