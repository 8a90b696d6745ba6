"""Stopping a run by a signal: SIGTERM, or SIGINT (Ctrl-C).

    signal                       what happens
    the first, within a step     the step is finished and a checkpoint saved, then the run stops
    the first, at another time   the run stops: there is nothing new to save
    the second                   the run stops at once
    none for `grace_s` seconds   the same, because the step or the checkpoint takes too long

To stop is to raise `KeyboardInterrupt(signal number)` in the main thread. It closes the worker
groups where it leaves the trainer, and the command line exits with 128 + the number.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def unchanged_handlers() -> Iterator[None]:
    """Restore the handlers of the signals after the block: Ray sets its own when it starts.

    A default handler is not restored: without one of our own, that of Ray stops Ray.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            ours = callable(handler) and handler is not signal.getsignal(number)
            if ours and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


class StopRequest:
    """Whether a signal has asked a run to stop.

    Args:
        save: finish the step and save a checkpoint first (`trainer.save_on_stop`).
        grace_s: seconds that this may take (`trainer.stop_grace_s`).
    """

    def __init__(self, *, save: bool, grace_s: float) -> None:
        self.save = save
        self.grace_s = grace_s
        self.number: int | None = None
        self._within_steps = False
        self._timer: threading.Timer | None = None

    @property
    def requested(self) -> bool:
        """Whether the run must stop after the current step."""
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals within the block. In another thread than the main one, which alone
        receives signals, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Within the block, the first signal lets the current step end."""
        self._within_steps = self.save
        try:
            yield
        finally:
            self._within_steps = False

    def stop_if_requested(self) -> None:
        """Stop the run if a signal has asked for it."""
        if self.number is not None:
            raise KeyboardInterrupt(self.number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.number is not None or not self._within_steps:
            raise KeyboardInterrupt(self.number or number)
        self.number = number
        # The second signal comes from a timer if not from the user. It is sent to the main thread,
        # because a signal interrupts the waiting of that thread only which receives it.
        main = threading.get_ident()
        self._timer = threading.Timer(self.grace_s, signal.pthread_kill, (main, number))
        self._timer.daemon = True
        self._timer.start()
        # Not `print`: the signal may have interrupted one, whose buffer is then locked.
        text = "stopping after this step, with a checkpoint; a second signal stops at once"
        os.write(2, f"\n{text} (the latest after {self.grace_s:g} s)\n".encode())
