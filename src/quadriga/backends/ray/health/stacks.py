"""Read the stacks and the last output of a rank's process, on its node.

A rank that is stuck cannot run a method, so its stack is asked for by a signal. `faulthandler`
responds in C code, also while the thread holds the interpreter or waits inside a system call:

    controller ──► task on the rank's node ──SIGUSR2──► rank process writes its stack file
                                           ◄── reads what was added to the stack file
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import ray

from quadriga.backends.ray.cluster import STACK_SIGNAL
from quadriga.backends.ray.health.nodes import on_node_of, text_of
from quadriga.single_controller.backend import RankHandle

RANK_HOST = os.path.join("single_controller", "ranks", "rank_host.py")
WAIT_S = 2.0
NOTHING_RUNS = "  (no method of a worker is running)"
LAST_LINES = 20
LAST_BYTES = 64 * 1024
"""How much of the end of a log file is read."""

COLLECTIVES = tuple(
    os.path.join(*part.split("/"))
    for part in (
        "torch/distributed/distributed_c10d.py",
        "torch/distributed/_functional_collectives.py",
        "torch/distributed/rendezvous.py",
        "torch/distributed/nn/functional.py",
        "torch/distributed/tensor/_collective_utils.py",
        "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
        "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py",
        "ray/util/collective/",
    )
)
"""Files whose functions wait for other ranks. Other files of `torch/distributed` compute, or write
checkpoints to a disk that may be slow."""
_LOCAL_STEPS = ("_object_to_tensor", "_tensor_to_object")
"""Functions of those files that pickle, and wait for no other rank."""
_WRAPPERS = tuple(
    os.path.join(*part.split("/"))
    for part in (
        "torch/distributed/c10d_logger.py",
        "torch/utils/_contextlib.py",
        "torch/_ops.py",
        "torch/_compile.py",
        "torch/_dynamo/eval_frame.py",
    )
)
"""Files whose frames stand between a collective and the code that called it."""


def stacks_of(handles: Sequence[RankHandle]) -> dict[int, str]:
    """Return for each rank the stack of the thread that runs a call, innermost frame first.

    A coroutine that waits is on the stack of no thread. The event loop of its rank is free, and is
    asked by an ordinary call where its coroutines wait.
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
            stacks[asked[ref]] = text_of(ref) or NOTHING_RUNS
    return stacks


def in_collective(stack: str) -> bool:
    """Return whether the innermost function of a stack waits for other ranks.

    For `dist.all_reduce` that is frame 0 here:

        File ".../torch/distributed/distributed_c10d.py", line 2810 in all_reduce
        File ".../torch/distributed/c10d_logger.py", line 81 in wrapper
        File ".../my_worker.py", line 12 in update_actor
    """
    for line in stack.splitlines():
        if any(wrapper in line for wrapper in _WRAPPERS):
            continue
        return any(file in line for file in COLLECTIVES) and not line.endswith(_LOCAL_STEPS)
    return False


def last_lines(handle: RankHandle) -> str:
    """Return what a rank's process wrote to its stderr last."""
    texts = on_node_of([handle], tail, lambda h: h.facts.log_path)
    return texts[handle.facts.rank] or "  (no log)"


def dump(process: tuple[int, str]) -> str:
    """Make a process of this node write its stacks, and read them.

    `process`: its process id and the path of its stack file.
    """
    pid, path = process
    try:
        before = os.path.getsize(path)
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return f"  (process {pid} cannot be asked: {error})"
    deadline = time.monotonic() + WAIT_S
    size = before
    try:
        # The dump is complete when the file has grown and then stays as it is for 50 ms.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = os.path.getsize(path)
            if grown > before and grown == size:
                break
            size = grown
        with open(path, errors="replace") as file:
            file.seek(before)
            return running_thread(file.read()) or f"  (process {pid} does not respond)"
    except OSError as error:
        return f"  (process {pid} has ended: {error})"


def running_thread(text: str) -> str:
    """Return, of a dump of all threads, the one that runs a worker's method, down to that method.

    "" for an empty dump.
    """
    for thread in text.strip().split("\n\n"):
        lines = thread.splitlines()
        inside = [i for i, line in enumerate(lines) if RANK_HOST in line]
        if inside:
            return "\n".join(lines[1 : inside[0]] or lines)
    return NOTHING_RUNS if text.strip() else ""


def tail(path: str | None) -> str:
    """Return the last 20 lines of a file of this node, without the markers that Ray writes.

    Only the last 64 KiB are read.
    """
    if not path or not os.path.exists(path):
        return "  (no log)"
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LAST_BYTES)
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = text.splitlines()[1 if start else 0 :] or text.splitlines()
    shown = [line.rstrip() for line in lines if not line.startswith(":")]
    return "\n".join("  " + line for line in shown[-LAST_LINES:]) or "  (nothing)"
