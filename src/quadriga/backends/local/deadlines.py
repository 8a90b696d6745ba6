"""Deadlines of calls that run in the caller's own thread.

Nobody can take a thread away from what it runs, and a breakpoint must be able to hold it. So one
thread of this process looks on: at the deadline it says so and writes down where the call stands;
when the call comes back, it is an error with that stack. While a call takes long, one line a
minute says whom the program waits for. A call that stands in a debugger is never late.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from types import FrameType, TracebackType

from quadriga.errors import CallTimeoutError
from quadriga.single_controller.call import Call
from quadriga.single_controller.ranks import rank_host
from quadriga.single_controller.ranks.rank_host import RankHost

logger = logging.getLogger("quadriga.controller")

SPEAK_S = 60.0
"""How often a long call is spoken of."""
DEBUGGERS = ("bdb.py", "pdb.py", "pydevd.py", "pydevd_frame.py")


class RunningCall:
    """One call of one rank, while it runs: `with RunningCall(host, call, timeout): …`.

    Raises CallTimeoutError at the end of the block if `timeout` seconds had passed.
    """

    def __init__(self, host: RankHost, call: Call, timeout: float | None) -> None:
        self.label = f"{call.role}.{call.method}"
        self.role, self.method = call.role, call.method
        self.place, self.node = host.place, host.node
        self.timeout = timeout
        self.thread = threading.get_ident()
        self.began = time.monotonic()
        self.spoken = self.began
        self.stack: str | None = None
        self.debugged = False

    def __enter__(self) -> None:
        _onlooker.watch(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _onlooker.forget(self)
        took = time.monotonic() - self.began
        if error is None and self.timeout is not None and took >= self.timeout:
            self._raise_if_late(self.timeout, took)

    def _raise_if_late(self, timeout: float, took: float) -> None:
        if self.debugged:
            return
        rank = self.place.rank
        stack = self.stack or "  (it ended at that moment)"
        raise CallTimeoutError(
            f"{self.label} passed its deadline of {timeout:g} s on rank(s) {rank}: it took "
            f"{took:.1f} s. A local rank runs in the caller's own thread, so it was not cut "
            f"short.\n\nStack of rank {rank} at the deadline:\n{stack}",
            role=self.role,
            rank=rank,
            node=self.node,
            method=self.method,
            stacks={rank: stack},
        )

    # What the onlooker does

    def due(self) -> float:
        """When there is something to be done next."""
        speak = self.spoken + SPEAK_S
        if self.timeout is None or self.stack is not None:
            return speak
        return min(speak, self.began + self.timeout)

    def attend(self, now: float) -> None:
        """Note a deadline that has passed, or say who is waited for."""
        frame = sys._current_frames().get(self.thread)
        self.debugged = self.debugged or _in_debugger(frame)
        late = self.timeout is not None and now - self.began >= self.timeout
        if late and self.stack is None:
            self.stack = _stack(frame)
        elif now - self.spoken < SPEAK_S:
            return
        self.spoken = now
        if self.debugged:
            return
        rank, waited = self.place.rank, now - self.began
        if late:
            logger.warning(
                "%s on rank %d is past its deadline of %g s after %.0f s and goes on, because a "
                "local call cannot be cut short; it stands at\n%s",
                self.label, rank, self.timeout, waited, _stack(frame),
            )  # fmt: skip
        else:
            logger.warning("waiting for %s on rank(s) %d for %.0f s", self.label, rank, waited)


class _Onlooker:
    """The thread that looks at running calls. Consumes: the calls that run. Waits for: the next
    time that one of them is due. Unblocked by: a call that is due sooner."""

    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        """Also in a forked child, where the parent's lock and thread are of no use."""
        self._calls: dict[int, RunningCall] = {}
        self._changed = threading.Condition()
        self._next = float("inf")
        self._thread: threading.Thread | None = None

    def watch(self, call: RunningCall) -> None:
        due = call.due()
        with self._changed:
            self._calls[id(call)] = call
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="quadriga-onlooker", daemon=True
                )
                self._thread.start()
            elif due < self._next:
                self._changed.notify()

    def forget(self, call: RunningCall) -> None:
        with self._changed:
            self._calls.pop(id(call), None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for call in self._calls.values():
                    if call.due() <= now:
                        call.attend(now)
                self._next = min((call.due() for call in self._calls.values()), default=now + 60)
                self._changed.wait(max(0.0, self._next - time.monotonic()))


_onlooker = _Onlooker()
os.register_at_fork(after_in_child=_onlooker.start_afresh)


def _in_debugger(frame: FrameType | None) -> bool:
    while frame is not None:
        if os.path.basename(frame.f_code.co_filename) in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stack(frame: FrameType | None) -> str:
    """From the innermost frame down to the worker's method."""
    lines = []
    while frame is not None and frame.f_code.co_filename != rank_host.__file__:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) or "  (between two calls)"
