"""Bound the time and the memory of Python code that comes with a model, such as a chat template."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTimeError(Exception):
    """The code within `bounded` has exceeded its time."""


@contextmanager
def bounded(seconds: float, gigabytes: float) -> Iterator[None]:
    """Raise `OutOfTimeError` or `MemoryError` in the block once it exceeds its time or memory.

    The time is checked between two instructions of Python: one call of a function written in C is
    not interrupted. Memory (Linux only) is what the process allocates within the block in addition.
    """
    with _limited_memory(gigabytes), _limited_time(seconds):
        yield


@contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    thread, lock = threading.get_ident(), threading.Lock()
    over, raised = threading.Event(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                raised.set()
                _raise_in(thread, OutOfTimeError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        timer.cancel()
        if raised.is_set():
            _receive_raised_exception()


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in a thread, at the next point at which the interpreter looks for one.

    The exception must not be cancelled: after a cancelled one, CPython 3.11 looks for an exception
    at every such point for ever, and a profiler or a debugger then stops the process in a loop.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _receive_raised_exception() -> None:
    """Let an exception that another thread has raised in this one appear here at the latest."""
    for _ in range(100):
        pass  # the interpreter looks for one at each iteration


@contextmanager
def _limited_memory(gigabytes: float) -> Iterator[None]:
    allocated = _allocated_bytes()
    if allocated is None:
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = allocated + int(gigabytes * 2**30)
    if before != resource.RLIM_INFINITY:
        limit = min(limit, before)
    # The hard limit is kept, so that the soft one can be raised again.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _allocated_bytes() -> int | None:
    """Return the private writable memory of this process; None if the system does not tell."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmData:"):
                    return int(line.split()[1]) * 1024
    return None
