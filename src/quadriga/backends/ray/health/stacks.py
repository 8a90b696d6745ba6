"""What can be learned of a rank's process from its node: its stack, its last lines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import ray

from quadriga.backends.ray.health.nodes import answer_of, on_node_of
from quadriga.backends.ray.process.rank_process import STACK_SIGNAL
from quadriga.single_controller.backend import RankHandle

RANK_HOST = os.path.join("single_controller", "ranks", "rank_host.py")
COLLECTIVES = (os.path.join("torch", "distributed"), os.path.join("ray", "util", "collective"))
WAIT_S = 2.0
NOTHING_RUNS = "  (no method of a worker is running)"


def stacks_of(handles: Sequence[RankHandle]) -> dict[int, str]:
    """For each rank the stack of the thread that runs a call, innermost frame first.

    Asked for by a signal, so that a rank answers whatever it is doing. A coroutine that waits is
    on no thread's stack: its rank's event loop is free and says where it waits.
    """
    stacks = on_node_of(handles, dump, lambda h: (h.facts.pid, h.facts.stack_path))
    idle = [h for h in handles if stacks[h.facts.rank] == NOTHING_RUNS]
    asked = {
        h.native.quadriga_coroutines.remote(): h.facts.rank
        for h in idle
        if hasattr(h.native, "quadriga_coroutines")
    }
    if asked:
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=WAIT_S)[0]:
            stacks[asked[ref]] = answer_of(ref) or NOTHING_RUNS
    return stacks


def in_collective(stack: str) -> bool:
    """Whether a stack's innermost frames are those of a collective."""
    return any(part in line for line in stack.splitlines()[:6] for part in COLLECTIVES)


def last_lines(handle: RankHandle) -> str:
    """What a rank's process wrote to its stderr last."""
    answers = on_node_of([handle], tail, lambda h: (h.facts.log_path,))
    return answers[handle.facts.rank] or "  (no log)"


def dump(pid: int, path: str) -> str:
    """Make a process of this node write its stacks, and read them."""
    try:
        before = os.path.getsize(path)
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return f"  (process {pid} cannot be asked: {error})"
    deadline = time.monotonic() + WAIT_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        grown = os.path.getsize(path)
        if grown > before and grown == size:
            break
        size = grown
    with open(path, errors="replace") as file:
        file.seek(before)
        return telling(file.read()) or f"  (process {pid} did not answer)"


def telling(text: str) -> str:
    """Of a dump of all threads, the one that runs a worker's method, down to that method."""
    for thread in text.strip().split("\n\n"):
        lines = thread.splitlines()
        inside = [i for i, line in enumerate(lines) if RANK_HOST in line]
        if inside:
            return "\n".join(lines[1 : inside[0]] or lines)
    return NOTHING_RUNS if text.strip() else ""


def tail(path: str | None, count: int = 20) -> str:
    """The last lines of a file of this node, Ray's own markers left out."""
    if not path or not os.path.exists(path):
        return "  (no log)"
    with open(path, errors="replace") as file:
        lines = [line.rstrip() for line in file if not line.startswith(":")]
    return "\n".join("  " + line for line in lines[-count:]) or "  (nothing)"
