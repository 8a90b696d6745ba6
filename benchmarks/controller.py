"""Quadriga's controller beside raw Ray and beside verl 0.9.1, in one run.

    python benchmarks/controller.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/controller.py --quick          # smoke test, seconds, no figures

Each case of each system runs in a process of its own; numbers are medians over rounds. Calls of
Quadriga and of raw Ray are timed in turns inside one process, so that their ratio survives a slow
minute of the machine. Compare ratios of one run only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "RESULT "
RAY = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "object_store_memory": 200 * 2**20,
}


def timed(steps: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Median seconds of each step, the steps taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(times):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


# Quadriga


def ours_group(ranks: int) -> Any:
    from quadriga.backends import get_backend
    from quadriga.single_controller import Dispatch, Worker, register

    class Trivial(Worker):
        def __init__(self) -> None:
            super().__init__()
            import torch

            torch.set_num_threads(1)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def nothing(self) -> None: ...

    backend = get_backend("ray")
    backend.start(num_cpus=ranks * 2, **{k: RAY[k] for k in ("object_store_memory",)})
    pool = backend.resource_pool([ranks], use_gpu=False)
    return backend.worker_group(pool, backend.class_with_args(Trivial))


def ours_calls(ranks: int, times: int) -> dict[str, float]:
    import ray

    group = ours_group(ranks)
    actors = raw_actors(ranks)
    return timed(
        {
            "ours": group.nothing,
            "raw": lambda: ray.get([actor.nothing.remote() for actor in actors]),
        },
        times,
    )


def ours_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    began = time.perf_counter()
    ours_group(ranks).nothing()
    return {"ours": time.perf_counter() - began}


# Raw Ray


def raw_actors(ranks: int) -> list[Any]:
    import ray

    @ray.remote(num_cpus=1)
    class Trivial:
        def __init__(self) -> None:
            import torch

            torch.set_num_threads(1)

        def nothing(self) -> None: ...

    return [Trivial.remote() for _ in range(ranks)]


def raw_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    began = time.perf_counter()
    ray.get([actor.nothing.remote() for actor in raw_actors(ranks)])
    return {"raw": time.perf_counter() - began}


# verl


def peer_group(ranks: int) -> Any:
    import ray
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
    )

    @ray.remote
    class Trivial(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def nothing(self) -> None: ...

    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(Trivial), device_name="cpu")


def peer_calls(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    return timed({"peer": peer_group(ranks).nothing}, times)


def peer_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    began = time.perf_counter()
    peer_group(ranks).nothing()
    return {"peer": time.perf_counter() - began}


# Imports


def imports(package: str, times: int) -> dict[str, float]:
    """Seconds of `import package` above an empty interpreter."""

    def run(code: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    found = timed({"empty": run("pass"), "import": run(f"import {package}")}, times)
    heavy = subprocess.run(
        [sys.executable, "-c", f"import {package}, sys; print('torch' in sys.modules,"
         " 'ray' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {"import_s": found["import"] - found["empty"], "heavy": float("True" in heavy.stdout)}


def ours_imports(ranks: int, times: int) -> dict[str, float]:
    return imports("quadriga", times)


def peer_imports(ranks: int, times: int) -> dict[str, float]:
    return imports("verl", times)


CASES = {
    ("ours", "calls"): ours_calls,
    ("peer", "calls"): peer_calls,
    ("ours", "start"): ours_start,
    ("raw", "start"): raw_start,
    ("peer", "start"): peer_start,
    ("ours", "imports"): ours_imports,
    ("peer", "imports"): peer_imports,
}
FULL = (("calls", 2, 500), ("calls", 8, 200), ("start", 2, 1), ("start", 8, 1), ("imports", 0, 5))
QUICK = (("calls", 2, 20), ("start", 2, 1), ("imports", 0, 2))


# The run


def run_case(system: str, case: str, ranks: int, times: int, python: str) -> dict[str, float]:
    """One process; stops with its last lines when it fails."""
    command = [python, __file__, "--case", f"{system}:{case}:{ranks}:{times}"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{system} {case} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(lines[-1].removeprefix(MARK))
    return found


def collect(cases: Any, rounds: int, peer_python: str | None) -> dict[str, dict[str, float]]:
    """`{case: {system: seconds}}`, medians over the rounds."""
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for case, ranks, times in cases:
            for system in [name for name, known in CASES if known == case]:
                if system == "peer" and not peer_python:
                    continue
                print(f"round {number + 1}: {case} {ranks} {system}", file=sys.stderr, flush=True)
                python = str(peer_python) if system == "peer" else sys.executable
                key = f"{case}_{ranks}" if ranks else case
                for name, value in run_case(system, case, ranks, times, python).items():
                    label = name if case != "imports" else f"{system}_{name}"
                    seen.setdefault(key, {}).setdefault(label, []).append(value)
    return {
        key: {name: statistics.median(values) for name, values in systems.items()}
        for key, systems in seen.items()
    }


def figures(results: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """What was measured beside its goal."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float, goal: float, at_most: bool = True) -> None:
        met = value <= goal if at_most else value >= goal
        words = f"{'at most' if at_most else 'at least'} {goal:g}"
        found[name] = {"value": round(value, 3), "goal": words, "met": met}

    for ranks in (2, 8):
        calls = results.get(f"calls_{ranks}", {})
        if calls:
            add(f"empty call, {ranks} ranks: times raw Ray", calls["ours"] / calls["raw"], 1.5)
        if "peer" in calls:
            name = f"empty call, {ranks} ranks: times faster than verl"
            add(name, calls["peer"] / calls["ours"], 1.0, at_most=False)
    start = results.get("start_8", {})
    if start:
        add("start of 8 workers: times raw Ray with torch", start["ours"] / start["raw"], 1.3)
    if "peer" in start:
        faster = start["peer"] / start["ours"]
        add("start of 8 workers: times faster than verl", faster, 2.0, at_most=False)
    loaded = results.get("imports", {})
    if loaded:
        add("import quadriga, seconds", loaded["ours_import_s"], 0.3)
        add("import quadriga loads torch or ray", loaded["ours_heavy"], 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", help="a Python that has verl 0.9.1; without it, no peer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small and once: does it run?")
    parser.add_argument("--out", help="write the JSON there too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        system, case, ranks, times = options.case.split(":")
        found = CASES[system, case](int(ranks), int(times))
        print(MARK + json.dumps(found), flush=True)
        return
    before = os.getloadavg()[0]
    cases, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    results = collect(cases, rounds, options.peer_python)
    report = {
        "machine": {
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "load_before": before,
        },
        "seconds": results,
        "figures": {} if options.quick else figures(results),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
