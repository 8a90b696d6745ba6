"""Speed of Quadriga's controller, of raw Ray and of verl 0.9.1: calls, starts, imports.

    python benchmarks/controller.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/controller.py --quick          # smoke test of a few seconds, exit code 0

Each case of each system runs in a new process; numbers are medians over rounds. Calls of Quadriga
and of raw Ray alternate inside one process, so that a change in the load of the machine affects
both; calls of verl and of raw Ray alternate in another process. Compare ratios of one run only.
The time of a start begins when Ray runs and the driver has imported its modules, and ends with the
result of the first call.
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
UNUSED = (
    "torch", "tensordict", "transformers", "tokenizers", "pandas", "pyarrow", "hydra", "omegaconf",
    "tensorboard", "datasets", "scipy", "sklearn", "peft", "rich", "wandb", "vllm", "verl",
)  # fmt: skip
"""Libraries that a worker process should not import if its worker does not use them."""
RAY = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": logging.ERROR,
    "object_store_memory": 200 * 2**20,
}


def timed(steps: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Return the median seconds of each step. The steps alternate."""
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


def ours_group(ranks: int, with_torch: bool = True) -> Callable[[], Any]:
    """Return a function that starts a group. Its imports are done before it is called."""
    from quadriga.backends import get_backend
    from quadriga.backends.ray import RayWorkerGroup  # noqa: F401 - imported before the measurement
    from quadriga.single_controller import Dispatch, Worker, register

    class Trivial(Worker):
        def __init__(self) -> None:
            super().__init__()
            if with_torch:
                import torch

                torch.set_num_threads(1)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def nothing(self) -> None: ...

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def modules(self) -> list[str]:
            return list(sys.modules)

    backend = get_backend("ray")
    backend.start(num_cpus=ranks * 2, **{k: RAY[k] for k in ("object_store_memory",)})
    pool = backend.resource_pool([ranks], use_gpu=False)
    return lambda: backend.worker_group(pool, backend.class_with_args(Trivial))


def ours_calls(ranks: int, times: int) -> dict[str, float]:
    group = ours_group(ranks)()
    return timed({"ours": group.nothing, "raw": raw_call(ranks)}, times)


def ours_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    start = ours_group(ranks)
    began = time.perf_counter()
    start().nothing()
    return {"ours": time.perf_counter() - began}


def ours_modules(ranks: int, times: int) -> dict[str, Any]:
    """Count the modules of a process whose worker uses no library, and of a raw Ray actor."""
    import ray

    group = ours_group(1, with_torch=False)()

    @ray.remote(num_cpus=0)
    class Bare:
        def modules(self) -> list[str]:
            return list(sys.modules)

    bare = Bare.remote()
    for _ in range(2):  # Ray imports more modules for the first result of a process
        ours = set(group.modules()[0])
        raw = set(ray.get(bare.modules.remote()))
    beyond = {name.partition(".")[0] for name in ours - raw}
    return {
        "modules": len(ours),
        "raw_modules": len(raw),
        "packages_beyond_raw": sorted(beyond - {"__mp_main__"}),
        "unused": sorted({name.partition(".")[0] for name in ours} & set(UNUSED)),
        "unused_in_raw": sorted({name.partition(".")[0] for name in raw} & set(UNUSED)),
    }


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


def raw_call(ranks: int) -> Callable[[], Any]:
    """Start actors and return a function that calls a method of all of them with raw Ray."""
    import ray

    actors = raw_actors(ranks)
    return lambda: ray.get([actor.nothing.remote() for actor in actors])


def raw_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    began = time.perf_counter()
    raw_call(ranks)()
    return {"raw": time.perf_counter() - began}


# verl


def peer_group(ranks: int) -> Callable[[], Any]:
    """Return a function that starts a group. Its imports are done before it is called."""
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
    return lambda: RayWorkerGroup(pool, RayClassWithInitArgs(Trivial), device_name="cpu")


def peer_calls(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks * 2, **RAY)
    group = peer_group(ranks)()
    return timed({"peer": group.nothing, "peer_raw": raw_call(ranks)}, times)


def peer_start(ranks: int, times: int) -> dict[str, float]:
    import ray

    ray.init("local", num_cpus=ranks, **RAY)
    start = peer_group(ranks)
    began = time.perf_counter()
    start().nothing()
    return {"peer": time.perf_counter() - began}


# Imports


def imports(package: str, times: int) -> dict[str, Any]:
    """Return the seconds of `import package`, without those of starting an empty interpreter."""

    def run(code: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    found = timed({"empty": run("pass"), "import": run(f"import {package}")}, times)
    code = f"import {package}, sys; print(*(n for n in ('torch', 'ray') if n in sys.modules))"
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"import_s": found["import"] - found["empty"], "loads": heavy.stdout.split()}


def ours_imports(ranks: int, times: int) -> dict[str, Any]:
    return imports("quadriga", times)


def peer_imports(ranks: int, times: int) -> dict[str, Any]:
    return imports("verl", times)


CASES = {
    ("ours", "calls"): ours_calls,
    ("peer", "calls"): peer_calls,
    ("ours", "start"): ours_start,
    ("raw", "start"): raw_start,
    ("peer", "start"): peer_start,
    ("ours", "modules"): ours_modules,
    ("ours", "imports"): ours_imports,
    ("peer", "imports"): peer_imports,
}
FULL = (
    ("calls", 2, 500), ("calls", 8, 200), ("start", 2, 1), ("start", 8, 1), ("imports", 0, 5),
    ("modules", 0, 1),
)  # fmt: skip
QUICK = (("calls", 2, 20), ("start", 2, 1), ("imports", 0, 2), ("modules", 0, 1))


# The run


def run_case(system: str, case: str, ranks: int, times: int, python: str) -> dict[str, Any]:
    """Run one case in a new process. Exit with the end of its output if it fails."""
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
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def collect(cases: Any, rounds: int, peer_python: str | None) -> dict[str, dict[str, Any]]:
    """Run all cases. Return {case: {figure: value}} with medians over the rounds."""
    seen: dict[str, dict[str, list[Any]]] = {}
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
        key: {name: median_or_union(values) for name, values in found.items()}
        for key, found in seen.items()
    }


def median_or_union(values: list[Any]) -> Any:
    """Return the median of numbers, or the union of lists of names."""
    if isinstance(values[0], list):
        return sorted({name for names in values for name in names})
    return statistics.median(values)


def goals(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every figure with its goal."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: str, value: float, goal: float, at_least: bool = False) -> None:
        met = value >= goal if at_least else value <= goal
        word = "at least" if at_least else "at most"
        found[name] = {"value": round(value, 3), "goal": f"{word} {goal:g}", "met": met}

    def nothing(name: str, loaded: list[str]) -> None:
        found[name] = {"value": loaded, "goal": "none", "met": not loaded}

    for ranks in (2, 8):
        calls = results.get(f"calls_{ranks}", {})
        if calls:
            add(f"empty_call_{ranks}_ranks_times_raw_ray", calls["ours"] / calls["raw"], 1.5)
    start = results.get("start_8", {})
    if start:
        add("start_8_workers_times_raw_ray_with_torch", start["ours"] / start["raw"], 1.3)
    if "peer" in start:
        faster = start["peer"] / start["ours"]
        add("start_8_workers_times_faster_than_verl", faster, 2.0, at_least=True)
    add("import_quadriga_seconds", results["imports"]["ours_import_s"], 0.3)
    nothing("import_quadriga_loads_of_torch_and_ray", results["imports"]["ours_loads"])
    modules = results["modules"]
    unused = sorted(set(modules["unused"]) - set(modules["unused_in_raw"]))
    nothing("unused_packages_in_a_worker_process_beyond_those_of_ray", unused)
    return found


def multiples_of_raw_ray(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the time of an empty call of Quadriga and of verl, divided by that of raw Ray."""
    found = {}
    for ranks in (2, 8):
        calls = results.get(f"calls_{ranks}", {})
        if "peer" in calls:
            found[f"{ranks}_ranks_ours_times_raw"] = round(calls["ours"] / calls["raw"], 3)
            found[f"{ranks}_ranks_verl_times_raw"] = round(calls["peer"] / calls["peer_raw"], 3)
    return found


def main() -> None:
    """Run and print JSON. The exit code is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--peer-python", help="a Python with verl 0.9.1; without it, verl is left out"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, exit code 0")
    parser.add_argument("--out", help="also write the JSON to this file")
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
        "measured": results,
        "empty_call_beside_verl": multiples_of_raw_ray(results),
        "goals": goals(results),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")
    if not options.quick and not all(goal["met"] for goal in report["goals"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
