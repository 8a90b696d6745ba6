"""Early detection of broken groups. Every call and every wait tests `broken_groups`."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from quadriga.errors import WorkerError

OwnerT = TypeVar("OwnerT")

logger = logging.getLogger("quadriga.controller")

LOG_S = 60.0
"""How often a check that fails is logged."""

broken_groups: dict[int, WorkerError] = {}
"""id of a watched rank set → the error that was found. Empty while every watched group works."""
_lock = threading.Lock()


def report(owner: object, error: WorkerError) -> None:
    """Record that a watched group is broken.

    Waits on any group of this controller end with `error`, for as long as `owner` exists.
    """
    with _lock:
        # The first error is the cause; later ones are mostly its consequences.
        if id(owner) not in broken_groups:
            broken_groups[id(owner)] = error
            weakref.finalize(owner, broken_groups.pop, id(owner), None)


def forget(owner: object) -> None:
    """Remove the error of a group that was shut down or whose failure was handled."""
    with _lock:
        broken_groups.pop(id(owner), None)


def raise_if_broken() -> None:
    """Raise the error of a watched group that was found broken, if there is one.

    Test `if broken_groups:` first where each microsecond counts.
    """
    if broken_groups:
        with _lock:
            error = next(iter(broken_groups.values()), None)
        if error is not None:
            raise error


class Watch(Generic[OwnerT]):
    """A thread that calls `find_failure(owner)` every `interval` seconds.

    Consumes: nothing. Produces: one `report`, after which the thread ends. Waits for: the interval.
    Unblocked by: `stop`. The thread also ends when `owner` is deleted; `find_failure` receives
    the owner as its argument and must not hold a reference to it. If `find_failure` itself raises,
    the thread logs that, and checks again after the interval.
    """

    def __init__(
        self, owner: OwnerT, find_failure: Callable[[OwnerT], WorkerError | None], interval: float
    ) -> None:
        self._owner = weakref.ref(owner)
        self._find_failure = find_failure
        self._interval = interval
        self._stopped = threading.Event()
        self._logged = float("-inf")
        self._thread = threading.Thread(target=self._run, name="quadriga-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            owner = self._owner()
            if owner is None:
                return
            error = self._check(owner)
            # `stop` may have been called while the ranks were checked.
            if error is not None and not self._stopped.is_set():
                report(owner, error)
                return
            del owner  # a reference held while waiting would keep the group alive

    def _check(self, owner: OwnerT) -> WorkerError | None:
        try:
            return self._find_failure(owner)
        except Exception as problem:  # a thread that ends here would leave the group unwatched
            now = time.monotonic()
            if now - self._logged >= LOG_S:
                self._logged = now
                logger.warning(
                    "The ranks of a group could not be checked (%s: %s). The check is repeated "
                    "every %g s.", type(problem).__name__, problem, self._interval,
                )  # fmt: skip
            return None
