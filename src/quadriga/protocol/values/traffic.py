"""Counting what a process receives and stores, in bytes of payload."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(slots=True)
class Counts:
    """`fetched_*`: rows that were copied here out of stored shards or messages, exactly those rows
    and no more; `stored_*`: what this process put into its store."""

    fetched_bytes: int = 0
    fetched_fields: int = 0
    stored_bytes: int = 0
    stored_objects: int = 0


class Traffic:
    """Counters of this process; safe to add to from several threads."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._lock = threading.Lock()

    def fetched(self, nbytes: int) -> None:
        """One field arrived with this many bytes."""
        with self._lock:
            self._counts.fetched_bytes += nbytes
            self._counts.fetched_fields += 1

    def stored(self, nbytes: int) -> None:
        """One field went to the store with this many bytes."""
        with self._lock:
            self._counts.stored_bytes += nbytes
            self._counts.stored_objects += 1

    def snapshot(self) -> Counts:
        """The counts so far, as a copy."""
        with self._lock:
            return replace(self._counts)

    def reset(self) -> Counts:
        """Sets all counts to zero and returns what they were."""
        with self._lock:
            counts, self._counts = self._counts, Counts()
            return counts


traffic = Traffic()
