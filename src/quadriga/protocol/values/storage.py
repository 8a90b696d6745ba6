"""References to fields that lie elsewhere, and the store that keeps them.

The protocol knows no Ray: a backend hands it a `Store`, and a `Handle` is whatever that store
gives back.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True)
class Origin:
    """Who made a value: role ("actor"), rank, method ("compute_values") and node address."""

    role: str
    rank: int
    method: str
    node: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Origin, (self.role, self.rank, self.method, self.node)

    def __str__(self) -> str:
        method = f".{self.method}" if self.method else ""
        return f"{self.role}[{self.rank}]{method}"


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
        """The stored value; read-only, and not to be written into.

        Raises `LostObjectError` when it is gone.
        """

    @staticmethod
    def fetch_many(handles: Sequence[Any]) -> list[Any]:
        """The values of many handles of this class, waiting once for all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """`(class, arguments)`, and nothing else: a module-level class called with arguments."""


@runtime_checkable
class Store(Protocol):
    """Where values lie that do not travel inside a call or a reply."""

    @property
    def in_process(self) -> bool:
        """True when values stay in this process's own memory."""

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        """Keeps a snapshot of `value` until every handle to it is dropped."""

    def put_many(self, values: Sequence[tuple[Any, int]]) -> list[Handle]:
        """`put` of each `(value, nbytes)`. Values put together may be kept until all of their
        handles are dropped."""

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        """The values of these handles, in order."""


_counter = itertools.count()


class LocalHandle:
    """A handle that holds its value itself; pickling it carries the value along."""

    __slots__ = ("__weakref__", "key", "nbytes", "stored", "value")

    def __init__(self, value: Any, nbytes: int, key: str = "") -> None:
        self.value = value
        self.nbytes = nbytes
        self.key = key or f"here-{os.getpid()}-{next(_counter)}"
        self.stored: Handle | None = None
        """The handle of the same value in a shared store, once it was put there."""

    def fetch(self) -> Any:
        return self.value

    @staticmethod
    def fetch_many(handles: Sequence[Any]) -> list[Any]:
        return [handle.value for handle in handles]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalHandle, (self.value, self.nbytes, self.key)


def fetch_many(handles: Sequence[Handle]) -> list[Any]:
    """The values of any handles, in order; one wait for each kind of handle among them."""
    if not handles:
        return []
    kinds = {type(handle) for handle in handles}
    if len(kinds) == 1:
        return kinds.pop().fetch_many(handles)
    found: list[Any] = [None] * len(handles)
    for kind in kinds:
        at = [i for i, handle in enumerate(handles) if type(handle) is kind]
        for i, value in zip(at, kind.fetch_many([handles[i] for i in at]), strict=True):
            found[i] = value
    return found


def snapshot(value: Any) -> Any:
    """A private copy of a payload or of any picklable value."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if isinstance(value, tuple):
        return tuple(snapshot(v) for v in value)
    if type(value) is dict:
        return {k: snapshot(v) for k, v in value.items()}
    return copy.deepcopy(value)


class InProcessStore:
    """Keeps values in their handles: for one process, with or without a backend."""

    in_process = True

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return LocalHandle(snapshot(value), nbytes)

    def put_many(self, values: Sequence[tuple[Any, int]]) -> list[Handle]:
        return [self.put(value, nbytes) for value, nbytes in values]

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return fetch_many(handles)


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

    def __enter__(self) -> Self:
        global _process_store
        _process_store = self._before
        self._tokens.append(_context_store.set(self._store))
        return self

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
