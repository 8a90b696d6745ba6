"""Speed of Quadriga's algorithms and verl 0.9.1's: advantages, balancing, log-probabilities.

    python benchmarks/algorithms.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/algorithms.py --quick          # smoke test of a few seconds, no comparison

Both sides make the same inputs from one seed, run once before the measurement, and alternate, so
that a change in the load of the machine affects both. Every number is a median. Compare ratios of
one run only. Memory is the peak of one call in a new process, above the memory in use before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from maths import inputs  # noqa: E402
from plane.measure import machine, reset_peak  # noqa: E402

Result = dict[str, Any]
SETTLING_S = 0.05
# Quadriga must be faster than verl by these factors.
SPEED_GOALS = {
    "gae": 10.0,
    "reinforce_plus_plus": 10.0,
    "grpo": 3.0,
    "rloo": 3.0,
    "balance_1024_to_64": 40.0,
    "balance_4096_to_256": 60.0,
}


class Peer:
    """A process that runs the peer's code with its own Python. `script`: a file in `maths/`.

    Requests and results are lines of JSON, sent over pipes.
    """

    def __init__(self, python: str, threads: int, script: str = "peer.py") -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "maths" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def ask(self, **request: str) -> Result:
        """Send a request and return its result. Exit if the process of the peer has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("result "):
                result: Result = json.loads(line.removeprefix("result "))
                return result
        raise SystemExit(f"the process of the peer ended during the request {request}")

    def close(self) -> None:
        """End the process of the peer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def seconds(call: Callable[[], Any]) -> float:
    """Return the wall time of one call in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def settled(measure: Callable[[], float]) -> float:
    """Repeat the measurement for `SETTLING_S` seconds and return the one after that."""
    end = time.perf_counter() + SETTLING_S
    while time.perf_counter() < end:
        measure()
    return measure()


def alternate(calls: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Return the median of each measurement over `repeats` rounds, after one round that is dropped.

    A round takes every measurement once.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            value = call()
            if turn:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def compare_speed(name: str, ours: Callable[[], Any], peer: Peer | None, repeats: int) -> Result:
    """Return the milliseconds of both sides and the factor by which Quadriga is faster.

    Each measurement is preceded by `SETTLING_S` seconds of calls that are not counted. They start
    the threads of this side, fill the caches, and outlast the busy-waiting of the other side's
    threads after their work.
    """

    def our_seconds() -> float:
        return settled(lambda: seconds(ours))

    def peer_seconds() -> float:
        assert peer is not None
        return settled(lambda: float(peer.ask(time=name)["seconds"]))

    calls: dict[str, Callable[[], float]] = {"ours": our_seconds}
    if peer is not None:
        calls["peer"] = peer_seconds
    medians = alternate(calls, repeats)
    result = {f"{side}_ms": round(1e3 * value, 3) for side, value in medians.items()}
    if peer is not None:
        result["times_faster"] = round(medians["peer"] / medians["ours"], 2)
    return result


def balance_spreads(name: str, ours: Callable[[], Any], peer: Peer | None) -> Result:
    """Return for both sides the largest minus the smallest partition, in tokens."""
    lengths, _ = inputs.balance_lengths(name)
    totals = [sum(lengths[i] for i in part) for part in ours()]
    result: Result = {"ours_spread": max(totals) - min(totals)}
    if peer is not None:
        result["peer_spread"] = peer.ask(time=name)["spread"]
    return result


def peak_megabytes(form: str) -> float:
    """Return the peak memory of one forward and backward pass, measured in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", form], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def print_peak(form: str) -> None:
    """Measure and print the peak in MB. Runs in the new process, after a small pass."""
    import torch

    from maths.ours import logits_call

    call = logits_call(form)
    (torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).sum().backward()
    before = reset_peak()
    call()
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    print((peak - before) / 1e6)


def log_prob_forms(peer: Peer | None, repeats: int) -> Result:
    """Return seconds, peak megabytes and gradient errors of both forms, and verl's seconds."""
    from maths.ours import FORMS, logits_call

    runs = {form: logits_call(form) for form in FORMS}
    naive = [grad.clone() for grad in runs["naive"]()]
    error = max(
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(runs["linear"](), naive, strict=True)
    )
    calls: dict[str, Callable[[], float]] = {
        form: (lambda run=run: seconds(run))  # type: ignore[misc]
        for form, run in runs.items()
    }
    if peer is not None:
        calls["peer_fused"] = lambda: float(peer.ask(time="log_prob")["seconds"])
    medians = alternate(calls, repeats)
    peaks = {form: peak_megabytes(form) for form in FORMS}
    return {
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "peak_mb": {form: round(value, 1) for form, value in peaks.items()},
        "relative_gradient_error": error,
    }


def goals(speeds: dict[str, Result], logits: Result) -> dict[str, Result]:
    """Return every figure with its goal."""
    found: dict[str, Result] = {}

    def add(name: str, value: float, goal: float, at_least: bool = True) -> None:
        met = value >= goal if at_least else value <= goal
        word = "at least" if at_least else "at most"
        found[name] = {"value": round(value, 6), "goal": f"{word} {goal:g}", "met": met}

    for name, goal in SPEED_GOALS.items():
        if "times_faster" in speeds[name]:
            add(f"{name}_times_faster", speeds[name]["times_faster"], goal)
        if "peer_spread" in speeds[name]:
            add(f"{name}_spread", speeds[name]["ours_spread"], speeds[name]["peer_spread"], False)
    time_of, peak_of = logits["seconds"], logits["peak_mb"]
    add("linear_times_less_memory", peak_of["naive"] / peak_of["linear"], 8)
    add("linear_times_faster", time_of["naive"] / time_of["linear"], 1)
    add("linear_relative_gradient_error", logits["relative_gradient_error"], 1e-5, at_least=False)
    return found


def run(peer: Peer | None, repeats: int) -> Result:
    """Run all comparisons."""
    from maths.ours import advantage_call, balance_call

    speeds: dict[str, Result] = {}
    for name in inputs.ADVANTAGES:
        speeds[name] = compare_speed(name, advantage_call(name), peer, repeats)
        print(name, speeds[name], file=sys.stderr, flush=True)
    for name in inputs.BALANCES:
        call = balance_call(name)
        speeds[name] = compare_speed(name, call, peer, repeats)
        speeds[name] |= balance_spreads(name, call, peer)
        print(name, speeds[name], file=sys.stderr, flush=True)
    logits = log_prob_forms(peer, max(repeats // 2, 1))
    return {
        "machine": machine(),
        "speed": speeds,
        "log_prob": logits,
        "goals": goals(speeds, logits),
    }


def main() -> None:
    """Run and print JSON. The exit code is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer-python", help="a Python that has verl 0.9.1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="one repeat, no peer, exit code 0")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    if options.peak_of:
        print_peak(options.peak_of)
        return
    wants_peer = options.peer_python and not options.quick
    peer = Peer(options.peer_python, options.threads) if wants_peer else None
    try:
        result = run(peer, 1 if options.quick else options.repeats)
    finally:
        if peer is not None:
            peer.close()
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    if not options.quick and not all(goal["met"] for goal in result["goals"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
