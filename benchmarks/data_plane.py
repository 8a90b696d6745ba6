"""Speed of Quadriga's data plane, of raw Ray by reference and of verl 0.9.1.

    python benchmarks/data_plane.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/data_plane.py --quick          # smoke test of a few seconds, no comparison

Each case of each system runs in a new process; every number is a median. Systems alternate within a
round, so that a change in the load of the machine affects all of them. Every system runs warm-up
steps first, so that the memory of the store is touched before the measurement. Compare ratios of
one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from plane.goals import goals  # noqa: E402
from plane.measure import machine  # noqa: E402
from plane.run import MARK  # noqa: E402

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`systems` run the case `name` with these sizes. `key` is the name of the result."""

    key: str
    name: str
    systems: tuple[str, ...]
    megabytes: int
    ranks: int
    times: int


ALL = ("ours", "raw", "peer")
FULL = (
    Case("five_calls_64MB_2", "five_calls", ALL, 64, 2, 15),
    Case("five_calls_64MB_2", "five_calls_pipelined", ("raw",), 64, 2, 15),
    Case("five_calls_256MB_4", "five_calls", ALL, 256, 4, 9),
    Case("five_calls_256MB_4", "five_calls_pipelined", ("raw",), 256, 4, 9),
    Case("five_calls_4MB_2", "five_calls", ("ours", "raw"), 4, 2, 9),
    Case("five_calls_16MB_4", "five_calls", ("ours", "raw"), 16, 4, 9),
    Case("put_get_117MB", "put_get", ALL, 117, 1, 15),
    Case("put_get_117MB", "put_get", ("peer_numpy",), 117, 1, 15),
    Case("fan_out_4_4", "fan_out", ALL, 96, 4, 60),
    Case("fan_out_4_3", "fan_out", ALL, 96, 3, 60),
    Case("tiny_2", "tiny", ALL, 0, 2, 300),
    Case("tiny_8", "tiny", ALL, 0, 8, 150),
    Case("scaling", "scaling", ("scaling",), 0, 1024, 9),
)
QUICK = (
    Case("five_calls_64MB_2", "five_calls", ("ours", "raw"), 4, 2, 2),
    Case("put_get_117MB", "put_get", ("ours", "raw"), 12, 1, 2),
    Case("fan_out_4_3", "fan_out", ("ours",), 3, 3, 2),
    Case("tiny_2", "tiny", ("ours", "raw"), 0, 2, 20),
    Case("scaling", "scaling", ("scaling",), 0, 16, 2),
)


def run_case(case: Case, system: str, peer_python: str | None) -> Result:
    """Run one case in a new process. Exit with the end of its output if it fails."""
    python = sys.executable
    environment = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_free_objects_period_milliseconds": "10",  # Quadriga's setting, for all systems
        "PYTHONPATH": str(HERE),
        "OMP_NUM_THREADS": "1",
    }
    module = system
    if system.startswith("peer"):
        python, module = str(peer_python), "peer"
        if system == "peer_numpy":
            environment["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
    command = [python, str(HERE / "plane" / "run.py"), module, case.name]
    command += map(str, (case.megabytes, case.ranks, case.times))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment}
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(
            f"{system} {case.key} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        )
    found: Result = json.loads(lines[-1].removeprefix(MARK))
    return found


def median_of(rounds: list[Result]) -> Result:
    """Return the median of each number. Other values are those of the last round."""
    joined: Result = {}
    for key, last in rounds[-1].items():
        if isinstance(last, int | float):
            joined[key] = statistics.median(r[key] for r in rounds)
        elif isinstance(last, dict):
            joined[key] = median_of([r[key] for r in rounds])
        else:
            joined[key] = last
    return joined


def collect(cases: tuple[Case, ...], rounds: int, peer_python: str | None) -> dict[str, Result]:
    """Run all cases. Return {case: {system: numbers}}."""
    found: dict[str, dict[str, list[Result]]] = {}
    for number in range(rounds):
        for case in cases:
            for system in case.systems:
                if system.startswith("peer") and not peer_python:
                    continue
                name = "raw_pipelined" if case.name.endswith("pipelined") else system
                print(f"round {number + 1}: {case.key} {name}", file=sys.stderr, flush=True)
                result = run_case(case, system, peer_python)
                found.setdefault(case.key, {}).setdefault(name, []).append(result)
    return {
        key: {system: median_of(runs) for system, runs in systems.items()}
        for key, systems in found.items()
    }


def main() -> None:
    """Run and print JSON. The exit code is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--peer-python", help="a Python with verl 0.9.1; without it, verl is left out"
    )
    parser.add_argument("--rounds", type=int, default=3, help="each case runs this many times")
    parser.add_argument("--only", help="cases whose key contains this")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: a smoke test")
    options = parser.parse_args()
    before = machine()
    cases = QUICK if options.quick else FULL
    cases = tuple(c for c in cases if options.only is None or options.only in c.key)
    results = collect(cases, 1 if options.quick else options.rounds, options.peer_python)
    report = {"machine": before, "results": results, "goals": goals(results)}
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if not options.quick and not all(goal["met"] for goal in report["goals"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
