"""Random programs with faults on a simulated cluster of three nodes, compared with a model.

    python tests/nightly/chaos/chaos_run.py                       # 30 minutes, a random seed
    python tests/nightly/chaos/chaos_run.py --seconds 60 --seed 7

Three worker groups of 2, 3 and 2 ranks run on two nodes. The ranks of the third have coroutine
methods. Controller threads run random programs on them, and one more thread injects faults. Every
value is compared with a single-process model. The invariants:

- No operation takes longer than its deadline and 10 s.
- Every value equals that of the model.
- Every error is a QuadrigaError, is explained by a fault, and names role, rank and method.
- All ranks run the calls of all threads in one order.
- After the end no process or reference to an object is left. Bytes that Ray keeps although no
  process refers to them are noted.

A JSON report is printed at the end. The exit code is 1 if an invariant was violated. All random
choices follow from the seed; their timing does not.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Sequence

from chaos_cluster import ThreeNodes
from chaos_faults import Faults, check_order
from chaos_program import Program
from chaos_workers import ChaosWorker, CoroutineWorker
from chaos_world import GRACE_S, Report, StepEnded, Watchdog, World

from quadriga.backends import get_backend

THREADS = 3
LINK = 8.0
"""MB/s between two nodes."""
FIRST_STEPS = 3
"""Steps before the object stores are measured, which load what Ray loads once."""


def start_slots(world: World, rng: random.Random) -> None:
    """Start three groups with different numbers of ranks."""
    world.add_slot("left", ChaosWorker, (1, 1))
    world.add_slot("right", ChaosWorker, (1, 2))
    world.add_slot("tide", CoroutineWorker, (1, 1))
    for slot in world.slots:
        world.start(slot, rng)


def run_threads(
    world: World, programs: Sequence[Program], faults: Faults | None, seconds: float
) -> None:
    """Run the programs and the faults side by side for so many seconds."""
    targets = [(program.name, program.run) for program in programs]
    if faults is not None:
        targets.append(("faults", faults.run))
    threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in targets]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    world.finished.set()
    for thread in threads:  # the watchdog ends the run if one of them does not return
        thread.join()


def finish(world: World, faults: Faults, nodes: ThreeNodes, base: dict[str, int]) -> None:
    """Check the order of calls, end the groups and look for what is left."""
    rng = random.Random(0)
    for slot in world.slots:
        if slot.current is not None and slot.current.killed_at is None:
            try:
                check_order(faults, slot, slot.current, rng)
            except StepEnded:
                continue
    leaked = nodes.leaked_bytes(base)
    referring = nodes.referring() if leaked else []
    if referring:
        message = f"bytes (now, before) {leaked}, referred to by the processes {referring}"
        world.report.violation("leaked reference", message, "all batches were dropped")
    elif leaked:
        # Ray keeps some objects whose owner was killed: github.com/ray-project/ray/issues/64627.
        world.report.notes["bytes that no process refers to (now, before)"] = leaked
    for slot in world.slots:
        if slot.current is not None:
            world.end(slot.current)
            slot.current = None
    world.backend.shutdown()


def chaos(options: argparse.Namespace, seed: int) -> Report:
    """Run the program and return its report. A hang ends this process."""
    report = Report(seed)
    nodes = ThreeNodes(LINK)

    def on_hang() -> None:
        print(report.as_json(), flush=True)
        nodes.kill()
        os._exit(1)

    try:
        run(World(get_backend("ray"), Watchdog(report, on_hang), report), nodes, options, seed)
        left = nodes.shutdown()
    except BaseException:
        nodes.kill()
        raise
    if left:
        report.violation("leaked process", ", ".join(left), "the cluster was shut down")
    return report


def run(world: World, nodes: ThreeNodes, options: argparse.Namespace, seed: int) -> None:
    """Start the groups, run the threads, and check what is left when all of them have ended."""
    world.backend.start()
    start_slots(world, random.Random(f"{seed}/slots"))
    warm = Program(world, "warm", seed)
    for _ in range(FIRST_STEPS):
        warm.step()
    warm.batches.clear()
    time.sleep(1.0)
    base = nodes.used_bytes()
    programs = [Program(world, f"thread{i}", seed) for i in range(THREADS)]
    faults = Faults(world, nodes, seed)
    run_threads(world, programs, faults, options.seconds)
    finish(world, faults, nodes, base)
    world.watchdog.stop()


def main() -> None:
    """Read the options, run, print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="length of the run")
    parser.add_argument("--seed", type=int, default=None, help="of all random choices")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}, deadlines may be exceeded by {GRACE_S:g} s", file=sys.stderr, flush=True)
    report = chaos(options, seed)
    print(report.as_json(), flush=True)
    raise SystemExit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
