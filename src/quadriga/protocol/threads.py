"""Results that may not exist yet, and waiting for them in threads. Imports no torch."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

from quadriga.errors import CallTimeoutError

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_PAUSE_S = 0.05


class PendingValue:
    """The result of one rank, picklable. A backend overrides what it can do better."""

    __slots__ = ()

    @property
    def value_here(self) -> object:
        """The packed result if this process knows it without waiting, else None."""
        return None

    def result(self) -> Any:
        """Wait for the result. Raises the error of the worker."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether the result, or the error instead of it, exists."""
        return True

    def cancel(self) -> bool:
        """Drop the call if it has not started. Return False if it cannot be dropped."""
        return False

    @staticmethod
    def all_done(pendings: Sequence[Any]) -> bool:
        """Return whether `wait_all(pendings)` returns or raises without waiting for a rank."""
        return all(pending.done() for pending in pendings)

    @staticmethod
    def wait_all(pendings: Sequence[Any], timeout: float | None = None) -> None:
        """Wait for several at once, so that the first failure of any of them ends the wait.

        Raises `CallTimeoutError` after `timeout` seconds. Without a limit `result` waits.
        """
        ended = timeout is None or wait_until(lambda: all(p.done() for p in pendings), timeout)
        if not ended:
            raise CallTimeoutError("The future has no result in time. The call goes on.")


def wait_until(ended: Callable[[], bool], timeout: float | None) -> bool:
    """Ask in growing intervals whether something has ended. Return False after the timeout."""
    expires = None if timeout is None else time.monotonic() + timeout
    pause = 0.001
    while not ended():
        if expires is not None and time.monotonic() >= expires:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that waits, while the event loop goes on. Return or raise what it does.

    The function sees the context variables of the caller, as with `asyncio.to_thread`. That has a
    few threads for each event loop (6 on a machine of 2 cores): forty coroutines that wait for
    futures would use all of them, and a call that must read its arguments in a thread to complete
    these futures would wait for ever. Here each call has a thread of its own.

    If the caller is cancelled, the function goes on; a process that ends does not wait for it.
    """
    # Not as a variable: an error refers to this frame, and the future to the error.
    return await asyncio.wrap_future(started_in_thread(partial(function, *args, **kwargs)))


def started_in_thread(function: Callable[[], T]) -> Future[T]:
    """Return the outcome of a function that runs in a thread of its own from now on.

    It sees the context variables of the caller.
    """
    call = partial(contextvars.copy_context().run, function)
    future: Future[T] = Future()
    # Not of a `ThreadPoolExecutor`: Python waits for its threads when a process ends, and a thread
    # whose rank never returns would keep the process for ever.
    name = "quadriga-wait"
    threading.Thread(target=_settle, args=(future, call), name=name, daemon=True).start()
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
