"""Deadlines of calls that run in the thread of the caller.

Python cannot stop a thread from outside, and a breakpoint must be able to stop one for as long as
the user likes. Therefore a second thread watches the calls of this process:

    at the deadline            it logs a warning and records the stack of the call
    when the call returns      the call raises CallTimeoutError with that stack
    every 60 s of a call       it logs which rank the program waits for

A call that is stopped in a debugger never exceeds its deadline.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import FrameType, TracebackType

from quadriga.errors import CallTimeoutError
from quadriga.single_controller import rank_host
from quadriga.single_controller.call import Call
from quadriga.single_controller.rank_host import RankHost

logger = logging.getLogger("quadriga.controller")

LOG_S = 60.0
"""How often a long call is logged."""
LOOK_S = 0.02
"""How often running calls are looked at."""
DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "pydevd_frame.py")


class RunningCall:
    """One call of one rank while it runs: `with RunningCall(host, call, timeout): …`.

    Raises `CallTimeoutError` at the end of the block if it took `timeout` seconds or more.
    """

    def __init__(self, host: RankHost, call: Call, timeout: float | None) -> None:
        self.label = f"{call.role}.{call.method}"
        self.role, self.method = call.role, call.method
        self.place, self.node = host.place, host.node
        self.timeout = timeout
        self.thread = threading.get_ident()
        self.began = time.monotonic()
        self.logged = self.began
        self.stack: str | None = None
        """The stack at the deadline; None before."""
        self.debugged = False

    def __enter__(self) -> None:
        global _watcher
        _running[id(self)] = self
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="quadriga-deadlines", daemon=True)
            _watcher.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del _running[id(self)]
        took = time.monotonic() - self.began
        if error is None and self.timeout is not None and took >= self.timeout:
            self._raise_if_late(self.timeout, took)

    def _raise_if_late(self, timeout: float, took: float) -> None:
        if self.debugged:
            return
        rank = self.place.rank
        stack = self.stack or "  (it ended at that moment)"
        raise CallTimeoutError(
            f"{self.label} exceeded its deadline of {timeout:g} s on rank(s) {rank}: it took "
            f"{took:.1f} s. A local rank runs in the thread of the caller, so it was not "
            f"interrupted.\n\nStack of rank {rank} at the deadline:\n{stack}",
            role=self.role,
            rank=rank,
            node=self.node,
            method=self.method,
            stacks={rank: stack},
        )

    def check(self, now: float) -> None:
        """Record a deadline that was exceeded, or log that the program waits for this rank."""
        late = self.timeout is not None and now - self.began >= self.timeout
        first_late = late and self.stack is None
        if not first_late and now - self.logged < LOG_S:
            return
        frame = sys._current_frames().get(self.thread)
        self.debugged = self.debugged or _in_debugger(frame)
        if first_late:
            self.stack = _stack(frame)
        self.logged = now
        if self.debugged:
            return
        rank, waited = self.place.rank, now - self.began
        if late:
            logger.warning(
                "%s on rank %d exceeded its deadline of %g s after %.0f s and continues, because a "
                "local call cannot be interrupted; it is at\n%s",
                self.label, rank, self.timeout, waited, _stack(frame),
            )  # fmt: skip
        else:
            logger.warning("waiting for %s on rank(s) %d for %.0f s", self.label, rank, waited)


_running: dict[int, RunningCall] = {}
_watcher: threading.Thread | None = None


def _watch() -> None:
    """Look at running calls, for as long as the process exists.

    Consumes: the calls that run. Waits for: `LOOK_S`.
    """
    while True:
        time.sleep(LOOK_S)
        for call in list(_running.values()):
            call.check(time.monotonic())


def _forget() -> None:
    """Start with no call in a forked child, in which the thread of the parent does not exist."""
    global _watcher
    _watcher = None
    _running.clear()


os.register_at_fork(after_in_child=_forget)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stack(frame: FrameType | None) -> str:
    """Return the frames from the innermost one out to the worker's method."""
    lines = []
    while frame is not None and frame.f_code.co_filename != rank_host.__file__:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) or "  (between two calls)"
