"""Quadriga's data plane beside raw Ray by reference and beside verl 0.9.1, in one run.

    python benchmarks/data_plane.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/data_plane.py --quick          # smoke test, seconds, no figures

Each case of each system runs in a process of its own; every number is a median. Systems take turns
within a round, so that a slow minute of the machine hits all of them. Compare ratios of one run.
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

from plane.measure import machine  # noqa: E402
from plane.run import MARK  # noqa: E402

Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`systems` run `name` with these sizes; `key` names the result."""

    key: str
    name: str
    systems: tuple[str, ...]
    megabytes: int
    ranks: int
    times: int


ALL = ("ours", "raw", "peer")
FULL = (
    Case("five_calls_64MB_2", "five_calls", ALL, 64, 2, 9),
    Case("five_calls_64MB_2", "five_calls_pipelined", ("raw",), 64, 2, 9),
    Case("five_calls_256MB_4", "five_calls", ALL, 256, 4, 5),
    Case("five_calls_256MB_4", "five_calls_pipelined", ("raw",), 256, 4, 5),
    Case("five_calls_4MB_2", "five_calls", ("ours", "raw"), 4, 2, 9),
    Case("put_get_117MB", "put_get", ALL, 117, 1, 9),
    Case("put_get_117MB", "put_get", ("peer_numpy",), 117, 1, 9),
    Case("fan_out_4_4", "fan_out", ALL, 96, 4, 7),
    Case("fan_out_4_3", "fan_out", ALL, 96, 3, 7),
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
    """One process; raises with its last lines when it fails."""
    python = sys.executable
    environment = {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
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
    """Number by number; anything else as the last round had it."""
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
    """`{case: {system: numbers}}`."""
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


@dataclass(frozen=True)
class Figure:
    """A measured number beside its goal; `at_most` False means at least."""

    name: str
    value: float
    goal: float
    at_most: bool = True

    def line(self) -> Result:
        met = self.value <= self.goal if self.at_most else self.value >= self.goal
        word = "at most" if self.at_most else "at least"
        return {"value": round(self.value, 4), "goal": f"{word} {self.goal:g}", "met": met}


def figures(results: dict[str, Result]) -> dict[str, Result]:
    """The figures that the project promises, from what was measured."""
    found: list[Figure] = []

    def ratio(case: str, over: str, under: str, number: str, name: str, goal: float, most: bool):
        systems = results.get(case, {})
        if over in systems and under in systems:
            value = systems[over][number] / max(systems[under][number], 1e-9)
            found.append(Figure(f"{case}: {name}", value, goal, most))

    for case, faster in (("five_calls_64MB_2", 6), ("five_calls_256MB_4", 8)):
        ratio(case, "ours", "raw", "wall_s", "wall, times raw Ray", 1.5, True)
        ratio(case, "ours", "raw_pipelined", "wall_s", "wall, times raw Ray pipelined", 1.5, True)
        ratio(case, "ours", "raw", "cpu_s", "controller CPU, times raw Ray", 2, True)
        ratio(case, "peer", "ours", "wall_s", "times faster than verl", faster, False)
        ours = results.get(case, {}).get("ours")
        if ours:
            share = ours["extra_bytes"] / ours["payload_bytes"]
            found.append(Figure(f"{case}: controller memory, of payload", share, 0.05))
    small, large = (
        results.get(c, {}).get("ours") for c in ("five_calls_4MB_2", "five_calls_64MB_2")
    )
    if small and large:
        growth = large["extra_bytes"] - small["extra_bytes"]
        found.append(Figure("controller memory growth at 16 × the batch, MB", growth / 2**20, 1.0))
    found += _put_get(results.get("put_get_117MB", {}))
    for case in ("fan_out_4_4", "fan_out_4_3"):
        ratio(case, "peer", "ours", "wall_s", "times faster than verl's future path", 5, False)
        ours = results.get(case, {}).get("ours")
        if ours:
            exact = float(ours["received_bytes"] == ours["needed_bytes"])
            found.append(Figure(f"{case}: bytes received are the bytes needed", exact, 1, False))
    for case in ("tiny_2", "tiny_8"):
        ratio(case, "ours", "raw", "wall_s", "wall, times raw Ray", 2, True)
    return {figure.name: figure.line() for figure in found}


def _put_get(systems: Result) -> list[Figure]:
    def total(system: str, *names: str) -> float:
        return sum(systems[system][name] for name in names)

    if "ours" not in systems:
        return []
    ours, read = total("ours", "put_s", "get_s"), total("ours", "put_s", "get_s", "read_s")
    found = []
    for system, goal in (("peer", 20), ("peer_numpy", 4)):
        if system in systems:
            peer = total(system, "put_s", "get_s")
            name = {"peer": "verl", "peer_numpy": "verl's numpy mode"}[system]
            found.append(Figure(f"put + get: times faster than {name}", peer / ours, goal, False))
            found.append(
                Figure(f"put + get + read all: times faster than {name}", peer / read, 1, False)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", help="a Python that has verl 0.9.1; without it, no peer")
    parser.add_argument("--rounds", type=int, default=3, help="each case runs this many times")
    parser.add_argument("--only", help="cases whose key contains this")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: a smoke test")
    options = parser.parse_args()
    before = machine()
    cases = QUICK if options.quick else FULL
    cases = tuple(c for c in cases if options.only is None or options.only in c.key)
    results = collect(cases, 1 if options.quick else options.rounds, options.peer_python)
    report = {"machine": before, "results": results}
    if not options.quick:
        report["figures"] = figures(results)
    text = json.dumps(report, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
