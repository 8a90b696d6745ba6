"""The maths of Quadriga beside verl 0.9.1's, in one run: advantages, balancing, log-probabilities.

    python benchmarks/algorithms.py --peer-python /path/to/verl-env/bin/python --out result.json
    python benchmarks/algorithms.py --quick          # smoke test, seconds, no figures

Both sides make the same inputs from one seed, are warmed, and take turns, so that a slow minute of
the machine hits both. Every number is a median. Compare ratios of one run.
Memory is the peak above what was in use before, of one call in a process of its own.
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
# Ours must be so many times faster than verl.
SPEED_GOALS = {
    "gae": 10.0,
    "reinforce_plus_plus": 10.0,
    "grpo": 3.0,
    "rloo": 3.0,
    "balance_1024_to_64": 40.0,
    "balance_4096_to_256": 60.0,
}


class Peer:
    """A peer in its own Python, asked over pipes; `script` lies in `maths/`."""

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
        """One request, one answer; ends the program if the peer died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):
                answer: Result = json.loads(line.removeprefix("answer "))
                return answer
        raise SystemExit(f"the peer ended at {request}")

    def close(self) -> None:
        """End the peer's process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def settled(measure: Callable[[], float]) -> float:
    """The measurement that follows `SETTLING_S` of others."""
    end = time.perf_counter() + SETTLING_S
    while time.perf_counter() < end:
        measure()
    return measure()


def take_turns(calls: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of each over `repeats` rounds in which everyone has a turn, after one to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            value = call()
            if turn:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


def compare_speed(name: str, ours: Callable[[], Any], peer: Peer | None, repeats: int) -> Result:
    """Milliseconds of both, and how many times faster ours is.

    A turn begins with calls that do not count, for `SETTLING_S`: they wake the side's threads, fill
    the caches, and wait out the other side's threads, which spin for a while after their work.
    """

    def our_turn() -> float:
        return settled(lambda: seconds(ours))

    def peer_turn() -> float:
        assert peer is not None
        return settled(lambda: float(peer.ask(time=name)["seconds"]))

    calls: dict[str, Callable[[], float]] = {"ours": our_turn}
    if peer is not None:
        calls["peer"] = peer_turn
    medians = take_turns(calls, repeats)
    result = {f"{side}_ms": round(1e3 * value, 3) for side, value in medians.items()}
    if peer is not None:
        result["times_faster"] = round(medians["peer"] / medians["ours"], 2)
    return result


def balance_spreads(name: str, ours: Callable[[], Any], peer: Peer | None) -> Result:
    """Largest minus smallest part of both, in tokens."""
    lengths, _ = inputs.balance_lengths(name)
    totals = [sum(lengths[i] for i in part) for part in ours()]
    result: Result = {"ours_spread": max(totals) - min(totals)}
    if peer is not None:
        result["peer_spread"] = peer.ask(time=name)["spread"]
    return result


def peak_megabytes(form: str) -> float:
    """Peak of one forward and backward pass, in a fresh process that first ran a small one."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak-of", form], capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return float(done.stdout.split()[-1])


def print_peak(form: str) -> None:
    """Run in the fresh process: measure and print, in MB."""
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
    """Seconds, peak megabytes and gradients of the three forms (and seconds of verl's fused op)."""
    from maths.ours import FORMS, logits_call

    runs = {form: logits_call(form) for form in FORMS}
    naive = [grad.clone() for grad in runs["naive"]()]
    errors = {
        form: max(
            float((got - want).abs().max() / want.abs().max())
            for got, want in zip(runs[form](), naive, strict=True)
        )
        for form in ("linear", "folded")
    }
    calls: dict[str, Callable[[], float]] = {
        form: (lambda run=run: seconds(run))  # type: ignore[misc]
        for form, run in runs.items()
    }
    if peer is not None:
        calls["peer_fused"] = lambda: float(peer.ask(time="log_prob")["seconds"])
    medians = take_turns(calls, repeats)
    peaks = {form: peak_megabytes(form) for form in FORMS}
    return {
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "peak_mb": {form: round(value, 1) for form, value in peaks.items()},
        "relative_gradient_error": errors,
    }


def goals(speeds: dict[str, Result], logits: Result) -> dict[str, Result]:
    """Every figure beside its goal."""
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
    add("folded_times_faster", time_of["naive"] / time_of["folded"], 1.3)
    for form, error in logits["relative_gradient_error"].items():
        add(f"{form}_relative_gradient_error", error, 1e-5, at_least=False)
    return found


def run(peer: Peer | None, repeats: int) -> Result:
    """Everything."""
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
    """Parse, run, print JSON; a missed goal is told, not hidden, and sets the exit code to 1."""
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
