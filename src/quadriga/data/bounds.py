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
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                _raise_in(thread, OutOfTimeError)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        _raise_in(thread, None)  # an exception that is set but not raised yet
        timer.cancel()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction.

    None: cancel an exception that is set and not yet raised.
    """
    raised = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


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
