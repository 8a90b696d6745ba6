"""Memory of a process: freed blocks stay in the heap, and full garbage collections are rare.

**The C heap.** glibc returns large blocks to the system as soon as they are freed, and every page
of the next ones costs a page fault. A training step frees and allocates the same sizes again.

**The garbage collector.** A full collection visits every container object of the process. torch,
Ray and other libraries have half a million of them, which takes some tenths of a second, and with a
thousand ranks the objects of every second call are enough to start one. `gc.freeze()` would hide
the libraries' objects from the collector, but also every object of the user that exists by then: a
cycle of those would never be freed, and a worker group that is dropped is such a cycle. So full
collections are started less often, and the controller runs one while it waits for ranks anyway.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time

KEPT_BYTES = 256 * 2**20
"""A process keeps up to this much free memory at the end of its heap; glibc's own rule stops at
64 MiB."""
_LARGEST_BLOCK = 32 * 2**20
"""Larger blocks always come from the system: glibc allows no more."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_FULL_BY_DEFAULT = 10
FULL_EVERY_IN_RANK = 100
FULL_EVERY_IN_CONTROLLER = 1000
"""A full collection follows so many collections of the middle generation."""
IDLE_AFTER_S = 1.0
"""How long a wait must have lasted before a full collection is run in it."""
IDLE_EVERY_S = 30.0
IDLE_SHARE = 0.01
"""Such collections take at most this share of the time."""


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for the next blocks.

    Return False if the user's environment sets the limits of the heap, or without glibc.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK))


def collect_rarely(full_every: int) -> bool:
    """Start a full garbage collection after `full_every` collections of the middle generation.

    Return False if the user has chosen an interval, which then stays.
    """
    young, middle, full = gc.get_threshold()
    if full != _FULL_BY_DEFAULT or not young:
        return False
    gc.set_threshold(young, middle, full_every)
    return True


class _IdleCollector:
    """Run full collections in waits of the controller: `collect_in_wait(seconds)`.

    It does so only where `collect_rarely` has raised the interval. With collections of 0.4 s one is
    run every 40 s at most, and only in a wait that has lasted for a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0

    def __call__(self, waited: float) -> bool:
        """`waited`: how long the wait has lasted. Return whether a collection was run."""
        now = time.monotonic()
        if waited < IDLE_AFTER_S or now < self._next or not self._lock.acquire(blocking=False):
            return False
        try:
            if not gc.isenabled() or gc.get_threshold()[2] != FULL_EVERY_IN_CONTROLLER:
                return False
            gc.collect()
            end = time.monotonic()
            self._next = end + max(IDLE_EVERY_S, (end - now) / IDLE_SHARE)
            return True
        finally:
            self._lock.release()


collect_in_wait = _IdleCollector()
