"""Knowing early that a group is broken: every wait and every new call looks here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from quadriga.errors import WorkerError

OwnerT = TypeVar("OwnerT")

_broken: dict[int, WorkerError] = {}
_lock = threading.Lock()


def report(owner: object, error: WorkerError) -> None:
    """Say that a watched group is broken. Waits on any group of this controller end with it,
    for as long as `owner` lives."""
    with _lock:
        if id(owner) not in _broken:
            _broken[id(owner)] = error
            weakref.finalize(owner, _broken.pop, id(owner), None)


def forget(owner: object) -> None:
    """The group is ended on purpose, or its failure has been dealt with."""
    with _lock:
        _broken.pop(id(owner), None)


def raise_if_broken() -> None:
    """Raises the error of a watched group that was found broken, if there is one."""
    if _broken:
        with _lock:
            error = next(iter(_broken.values()), None)
        if error is not None:
            raise error


class Watch(Generic[OwnerT]):
    """A thread that looks every `interval` seconds and reports what it finds, once.

    It ends when its owner is gone: `look` gets the owner and must not hold it.
    """

    def __init__(
        self, owner: OwnerT, look: Callable[[OwnerT], WorkerError | None], interval: float
    ) -> None:
        self._owner = weakref.ref(owner)
        self._look = look
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quadriga-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            owner = self._owner()
            if owner is None:
                return
            error = self._look(owner)
            if error is not None and not self._stopped.is_set():
                report(owner, error)
                return
            del owner
