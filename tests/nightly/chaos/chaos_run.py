"""Random programs with faults on a simulated cluster of three nodes, compared with a model.

    PYTHONPATH=src:tests python tests/nightly/chaos/chaos_run.py 1800 7    # seconds and seed

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

import faulthandler
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable

from chaos_cluster import ThreeNodes
from chaos_faults import Faults, check_order
from chaos_program import Program
from chaos_workers import ChaosWorker, CoroutineWorker
from chaos_world import GRACE_S, START_S, Slot, StepEnded, World

from quadriga.backends import get_backend

THREADS = 3
LINK = 8.0
"""MB/s between two nodes."""
FIRST_STEPS = 3
"""Steps before the object stores are measured, which load what Ray loads once."""
GROUPS = (
    ("left", ChaosWorker, (1, 1)), ("right", ChaosWorker, (1, 2)), ("tide", CoroutineWorker, (1, 1))
)  # fmt: skip


def run_threads(world: World, runs: dict[str, Callable[[], None]], seconds: float) -> bool:
    """Run functions side by side for so many seconds. Return whether all of them have ended."""
    threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs.items()]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    world.finished.set()
    for thread in threads:
        thread.join(START_S + GRACE_S)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            world.violation("hang", f"{thread.name} does not return")
    return not any(thread.is_alive() for thread in threads)


def finish(world: World, faults: Faults, nodes: ThreeNodes, base: dict[str, int]) -> None:
    """Check the order of calls, end the groups and look for what is left."""
    running = [slot.current for slot in world.slots if slot.current is not None]
    for generation in running:
        if not generation.killed:
            check_order(faults, generation, random.Random(0))
    leaked = nodes.leaked_bytes(base)
    if referring := nodes.referring() if leaked else []:
        message = f"bytes (now, before) {leaked}, referred to by the processes {referring}"
        world.violation("leaked reference", message)
    elif leaked:
        # Ray keeps some objects whose owner was killed: github.com/ray-project/ray/issues/64627.
        print(f"bytes that no process refers to (now, before): {leaked}", file=sys.stderr)
    for generation in running:
        world.end(generation)
    world.backend.shutdown()


def main(seconds: float, seed: int) -> None:
    """Start the groups, run the threads, check what is left, and print the report."""
    world, nodes = World(get_backend("ray")), ThreeNodes(LINK)
    try:
        world.backend.start()
        for name, cls, ranks in GROUPS:
            pool = world.backend.resource_pool(list(ranks), use_gpu=False)
            world.slots.append(Slot(name, cls, ranks, pool))
            world.start(world.slots[-1], random.Random(f"{seed}/{name}"))
        warm = Program(world, "warm", seed)
        for _ in range(FIRST_STEPS):
            warm.step()
        warm.batches.clear()
        time.sleep(1.0)
        base = nodes.used_bytes()
        faults = Faults(world, nodes.folder, seed)
        programs = {f"thread{i}": Program(world, f"thread{i}", seed).run for i in range(THREADS)}
        if run_threads(world, programs | {"faults": faults.run}, seconds):
            finish(world, faults, nodes, base)
            if left := nodes.shutdown():
                world.violation("leaked process", ", ".join(left))
    except StepEnded as error:
        world.violation("unfinished", f"{error} failed outside of the threads")
    finally:
        nodes.kill()
    report = {"seed": seed, "counts": world.counts, "violations": world.violations}
    print(json.dumps(report, indent=1), flush=True)
    os._exit(bool(world.violations))  # a thread may not return


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
