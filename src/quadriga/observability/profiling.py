"""The profile of one process over one step: its calls, and a trace of what it computes.

A rank has one profile at a time. Colocated roles, and all ranks of the local backend, share the
process and so the trace.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import isawaitable
from pathlib import Path
from typing import NamedTuple

from quadriga.files import replacing, writing


class ProfiledCall(NamedTuple):
    """A call of a method, from `start` to `end` in seconds since 1970."""

    role: str
    rank: int
    method: str
    start: float
    end: float


class ProcessProfile:
    """Profiles this process from its construction until `stop`.

    torch   what PyTorch computes, in all threads
    memory  what the methods compute, with shapes and every allocation; with CUDA also the snapshot
            that https://pytorch.org/memory_viz shows
    nsys    marks the calls for Nsight Systems, under which the process was started
    calls   nothing but the calls

    Args:
        path: the trace, a file for Perfetto; with `nsys`, Nsight writes a file of its own.

    Attributes:
        calls: the methods that were called, in the order of their ends.
        marked: marks a block in the trace with a name.
    """

    def __init__(self, tool: str, path: Path) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile, record_function

        self.tool, self.path = tool, path
        self.calls: list[ProfiledCall] = []
        self._profiler: profile | None = None
        self._snapshot = tool == "memory" and torch.cuda.is_available()
        self.marked: Callable[[str], AbstractContextManager[object]] = nullcontext
        if tool == "calls":
            return
        if tool == "nsys":
            self.marked = torch.cuda.nvtx.range
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            return
        if self._snapshot:
            torch.cuda.memory._record_memory_history()
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.marked = record_function
        # With all threads PyTorch records no allocations; a rank's methods run in one thread.
        threads = _ExperimentalConfig(profile_all_threads=tool == "torch")
        self._profiler = profile(
            activities=kinds,
            record_shapes=tool == "memory",
            profile_memory=tool == "memory",
            experimental_config=threads,
        )
        self._profiler.start()

    def stop(self) -> list[ProfiledCall]:
        """End the profile, write the trace, and return the calls."""
        import torch

        if self.tool == "calls":
            return self.calls
        if self._profiler is None:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return self.calls
        self._profiler.stop()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as fresh:
            self._profiler.export_chrome_trace(str(fresh))
        if self._snapshot:
            snapshot = str(self.path.with_suffix(".pickle"))
            torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        return self.calls


_active: ProcessProfile | None = None


def start_profile(tool: str, path: Path) -> None:
    """Profile this process, unless a profile for this folder goes on already. One for another
    folder is ended."""
    global _active
    if _active is not None:
        if _active.path.parent == path.parent:
            return
        stop_profile()
    _active = ProcessProfile(tool, path)


def stop_profile() -> list[ProfiledCall]:
    """End the profile of this process, and return its calls; [] if there is none."""
    global _active
    profile, _active = _active, None
    return [] if profile is None else profile.stop()


def profiled(role: str, rank: int, method: str, start: Callable[[], object]) -> object:
    """Return `start()`, or what to await for it; a profile that goes on records the call."""
    profile = _active
    if profile is None or method == stop_profile.__name__:
        return start()
    began, value = time.time(), None

    def record() -> None:
        profile.calls.append(ProfiledCall(role, rank, method, began, time.time()))

    try:
        with profile.marked(f"{role}.{method}"):
            value = start()
    finally:
        if not isawaitable(value):
            record()
    return _awaited(value, record) if isawaitable(value) else value


async def _awaited(value: Awaitable[object], record: Callable[[], None]) -> object:
    try:
        return await value
    finally:
        record()
