"""Waiting for ranks in threads, for programs with an event loop.

`asyncio.to_thread` has a few threads for each event loop (6 on a machine of 2 cores). Forty
coroutines that wait for futures would use all of them, and a call that must read its arguments in a
thread to complete these futures would wait for ever. The threads here have no such limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Threads:
    """The threads of this process. They do not keep it from ending."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with no thread. A forked child calls it: the parent's threads are not in it."""
        self._lock = threading.Lock()
        self._idle = 0
        self._given: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` in an idle thread, or in a new one if no thread is idle."""
        with self._lock:
            found = self._idle > 0
            if found:
                self._idle -= 1
        if not found:
            # Not of a `ThreadPoolExecutor`: Python waits for its threads when a process ends, and a
            # thread whose rank never returns would keep the process for ever.
            threading.Thread(target=self._work, name="quadriga-wait", daemon=True).start()
        self._given.put(work)  # no argument of the thread, which would keep it for ever

    def _work(self) -> None:
        while True:
            work = self._given.get()
            work()
            del work  # what it refers to is not kept while the thread is idle
            with self._lock:
                self._idle += 1


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.reset)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that waits, while the event loop goes on. Return or raise what it does.

    The function sees the context variables of the caller, as with `asyncio.to_thread`. If the
    caller is cancelled, the function goes on; a process that ends does not wait for it.
    """
    return await asyncio.wrap_future(_started(partial(function, *args, **kwargs)))


def _started(function: Callable[[], T]) -> Future[T]:
    """Return the outcome of a function that runs in a thread from now on."""
    call = partial(contextvars.copy_context().run, function)
    future: Future[T] = Future()
    _threads.run(partial(_settle, future, call))
    return future


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function, and note its result or its error, which is raised in the caller."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # raised in the caller
        future.set_exception(error)
        # The error refers to this frame. With the future in it, that is a cycle.
        del future
