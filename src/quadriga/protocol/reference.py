"""References to fields that lie elsewhere, and the store that keeps them.

The protocol knows no Ray: a backend hands it a `Store`, and a `Handle` is whatever that store
gives back.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Origin:
    """Who made a value: role ("actor"), rank, method ("compute_values") and node address."""

    role: str
    rank: int
    method: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.role}[{self.rank}].{self.method}"


CONTROLLER = Origin("controller", 0, "")


@runtime_checkable
class Handle(Protocol):
    """Opaque, picklable name of one stored value. Dropping the last handle releases the value."""

    @property
    def key(self) -> str:
        """Equal keys name the same stored value."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored payload."""

    def fetch(self) -> Any:
        """The stored value; read-only memory unless documented otherwise.

        Raises `LostObjectError` when it is gone.
        """


@runtime_checkable
class Store(Protocol):
    """Where values lie that do not travel inside a call or a reply."""

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        """Keeps a snapshot of `value` until every handle to it is dropped."""

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        """The values of these handles, in order, waiting once for all of them."""


_counter = itertools.count()


@dataclass(frozen=True, slots=True)
class HereHandle:
    """A handle that holds its value itself."""

    value: Any
    nbytes: int
    key: str

    @classmethod
    def hold(cls, value: Any, nbytes: int) -> HereHandle:
        return cls(value, nbytes, f"here-{os.getpid()}-{next(_counter)}")

    def fetch(self) -> Any:
        return self.value


class InProcessStore:
    """Keeps values in their handles: for use without a backend."""

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return HereHandle.hold(value, nbytes)

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.fetch() for handle in handles]


_process_store: Store = InProcessStore()
_context_store: ContextVar[Store | None] = ContextVar("quadriga_store", default=None)


def current_store() -> Store:
    """The store that `pack_result`, `pack_argument` and `parallel_put` use here."""
    return _context_store.get() or _process_store


class use_store:
    """Makes `store` the current one.

    `use_store(store)` alone: for the whole process, from now on (a worker, at its start).
    `with use_store(store):` only within the block, in this thread and the tasks it starts.
    """

    def __init__(self, store: Store) -> None:
        global _process_store
        self._store, self._before = store, _process_store
        self._tokens: list[Token[Store | None]] = []
        _process_store = store

    def __enter__(self) -> Store:
        global _process_store
        _process_store = self._before
        self._tokens.append(_context_store.set(self._store))
        return self._store

    def __exit__(self, *error: object) -> None:
        _context_store.reset(self._tokens.pop())


def parallel_put(objects: Sequence[Any], max_workers: int | None = None) -> list[Handle]:
    """Puts many objects into the current store from threads; handles come back in order."""
    store = current_store()
    if not objects:
        return []
    workers = max_workers or min(16, len(objects))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(store.put, objects))
