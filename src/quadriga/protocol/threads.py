"""Waiting for ranks in threads, for programs with an event loop.

`asyncio.to_thread` has a few threads for each event loop (6 on a machine of 2 cores). Forty
coroutines that wait for futures would use all of them, and a call that must read its arguments in a
thread to complete these futures would wait for ever. The threads here have no such limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST = 100_000
"""More threads than a process can have. A thread is started only if no other one is idle."""


class _Threads:
    """The threads of this process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start with no thread. A forked child calls it: the parent's threads are not in it."""
        self.pool = ThreadPoolExecutor(MOST, thread_name_prefix="quadriga-wait")


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.reset)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that waits, while the event loop goes on. Return or raise what it does.

    The function sees the context variables of the caller, as with `asyncio.to_thread`.
    """
    call = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads.pool, call)
