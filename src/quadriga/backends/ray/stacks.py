"""The stack of a rank that does not answer, asked for by a signal."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.backends.ray.rank_process import STACK_SIGNAL
from quadriga.single_controller.backend import RankHandle

HOSTING = os.path.join("single_controller", "hosting.py")
WAIT_S = 2.0
NODE_WAIT_S = 10.0


def stacks_of(handles: Sequence[RankHandle]) -> dict[int, str]:
    """For each rank the stack of the thread that runs a call, innermost frame first.

    A rank on another node is asked by a task there, for 10 seconds at most.
    """
    here = ray.get_runtime_context().get_node_id()
    stacks: dict[int, str] = {}
    remote: dict[int, object] = {}
    for handle in handles:
        facts = handle.facts
        if not facts.stack_path:
            stacks[facts.rank] = "  (unknown)"
        elif facts.node_id == here:
            stacks[facts.rank] = dump(facts.pid, facts.stack_path)
        else:
            strategy = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(dump)
            remote[facts.rank] = task.options(scheduling_strategy=strategy).remote(
                facts.pid, facts.stack_path
            )
    for rank, ref in remote.items():
        try:
            stacks[rank] = ray.get(ref, timeout=NODE_WAIT_S)
        except ray.exceptions.RayError as error:
            stacks[rank] = f"  (its node does not answer: {type(error).__name__})"
    return stacks


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
        inside = [i for i, line in enumerate(lines) if HOSTING in line]
        if inside:
            return "\n".join(lines[1 : inside[0]] or lines)
    return text.strip()
