"""CPU time of the controller for 8 to 4096 ranks, beside raw Ray's empty call in the same run.

    python benchmarks/scale.py --out scale.json --plot docs/scale.png
    python benchmarks/scale.py --quick               # up to 64 ranks, below a minute

The ranks are simulated: the handles of all ranks are those of two actors (`scale_parts`). Times are
CPU seconds of all threads of the controller's process, medians over alternating runs. Prints JSON:
microseconds per rank, the exponent of the cost over the ranks, and the goals. The exit code is 1 if
a goal is missed, except with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from quadriga.backends import get_backend  # noqa: E402
from scale_parts import cases  # noqa: E402
from scale_parts.cases import Sizes, Step  # noqa: E402
from scale_parts.figures import goals, plot, slopes, us_per_rank  # noqa: E402
from scale_parts.simulated import ACTORS, Machines  # noqa: E402

FULL = Sizes((8, 64, 512, 1024, 4096), times=5, budget_s=30.0, wall_s=120.0, field_bytes=64 * 2**20)
QUICK = Sizes((8, 64), times=1, budget_s=3.0, wall_s=15.0, field_bytes=4 * 2**20)
NAMES = ("calls", "futures", "local_fields", "placement", "watching")


def steps_of(
    name: str, machines: Machines, ranks: int, sizes: Sizes
) -> AbstractContextManager[dict[str, Step]]:
    """Prepare the steps of one case."""
    if name == "local_fields":
        return cases.local_fields(machines, ranks, sizes.field_bytes)
    prepare = {
        "calls": cases.calls,
        "futures": cases.futures,
        "placement": cases.placement,
        "watching": cases.watching,
    }
    return prepare[name](machines, ranks)


def collect(names: tuple[str, ...], sizes: Sizes) -> dict[str, dict[int, float]]:
    """Measure all cases. Return {step: {ranks: CPU seconds}}."""
    backend = get_backend("ray")
    backend.start(num_cpus=2 * ACTORS, object_store_memory=2 * 2**30, log_to_driver=False)
    print("starting Ray and four ranks", file=sys.stderr, flush=True)
    machines = Machines(backend)
    seconds: dict[str, dict[int, float]] = {}
    began = time.monotonic()
    for name in names:
        walls: dict[int, float] = {}
        for ranks in sizes.ranks:
            start = time.monotonic()
            skipped = _expected(walls, ranks) > sizes.wall_s
            line = f"{start - began:6.1f} s  {name}, {ranks} ranks{' left out' if skipped else ''}"
            print(line, file=sys.stderr, flush=True)
            if skipped:
                continue
            expected = {step: _expected(by_ranks, ranks) for step, by_ranks in seconds.items()}
            with steps_of(name, machines, ranks, sizes) as steps:
                for step, value in cases.measure(steps, sizes, expected).items():
                    seconds.setdefault(step, {})[ranks] = value
            walls[ranks] = time.monotonic() - start
    machines.shutdown()
    backend.shutdown()
    return seconds


def _expected(by_ranks: dict[int, float], ranks: int) -> float:
    """Estimate the seconds of one run from two smaller sizes: the cost grows as it did there."""
    if len(by_ranks) < 2:
        return 0.0
    (few, less), (many, more) = sorted(by_ranks.items())[-2:]
    exponent = math.log(max(more / max(less, 1e-9), 1.0)) / math.log(many / few)
    return more * (ranks / many) ** max(1.0, exponent)


def main() -> None:
    """Measure, print JSON, draw the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 64 ranks, one run of each step")
    parser.add_argument("--only", choices=NAMES, action="append", help="these cases only")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves to this picture")
    options = parser.parse_args()
    seconds = collect(tuple(options.only or NAMES), QUICK if options.quick else FULL)
    figures = goals(seconds)
    report = {"us_per_rank": us_per_rank(seconds), "exponents": slopes(seconds), "goals": figures}
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if options.plot:
        plot(seconds, options.plot)
    if not options.quick and not all(figure["met"] for figure in figures.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
