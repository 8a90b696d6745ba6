"""Stored values: their handles, the store that keeps them, who wrote them, and traffic counters.

The protocol does not know Ray. A backend provides a `Store`; a `Handle` is what its `put` returns.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

StoredValue: TypeAlias = Any
"""What was put into a store: a payload, or any picklable value of a user."""


class Origin(NamedTuple):
    """The writer of a value: role ("actor"), rank, method ("compute_values"), node address."""

    role: str
    rank: int
    method: str
    node: str = ""


CONTROLLER = Origin("controller", 0, "")


class Handle(Protocol):
    """Opaque, picklable name of a stored value. Dropping the last handle releases the value."""

    @property
    def key(self) -> str:
        """Equal keys name the same stored value."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stored payload."""

    def fetch(self) -> StoredValue:
        """Return the stored value, which must not be written into.

        Raises `LostObjectError` when the value is gone.
        """

    @staticmethod
    def fetch_many(handles: Sequence[Any]) -> list[StoredValue]:
        """Return the values of several handles of this class, waiting once for all of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return `(class, arguments)` and nothing else: a module-level class and its arguments."""


class Store(Protocol):
    """Keeps values that are not sent inside a call or a result.

    A class of which several instances share their values has an attribute `session`: handles of
    stores with equal sessions may be used for each other.
    """

    @property
    def in_process(self) -> bool:
        """Whether values stay in the memory of this process."""

    def put(self, value: StoredValue, nbytes: int = 0) -> Handle:
        """Keep a snapshot of `value` until the last handle of it is dropped."""

    def put_many(self, values: Sequence[tuple[StoredValue, int]]) -> list[Handle]:
        """Put each `(value, nbytes)`. Values that are put together may be kept until the handles
        of all of them are dropped."""


class RowHandle(Handle, Protocol):
    """A handle of a store that can send some rows of a payload without the others."""

    @property
    def sends_rows(self) -> bool:
        """Whether some process can send rows of this value."""

    def pays(self, share: float) -> bool:
        """Return whether to fetch `share` of the rows (0.25: a quarter) without the others."""

    @staticmethod
    def fetch_rows(requests: Sequence[RowRequest]) -> list[StoredValue | None]:
        """Return for each request the payload of its rows, in their order.

        None: the rows could not be cut out, and the whole value is to be fetched.
        """


def is_row_handle(handle: Handle) -> TypeGuard[RowHandle]:
    """Return whether the store of a handle can send some rows of a payload."""
    return getattr(handle, "sends_rows", False)


class RowRequest(NamedTuple):
    """Rows of one stored payload: `rows` are numbers of rows in it, int64."""

    handle: RowHandle
    rows: NDArray[np.int64]


_counter = itertools.count()


class LocalHandle:
    """A handle that contains its value. Pickling the handle pickles the value."""

    __slots__ = ("__weakref__", "key", "nbytes", "stored", "value")

    def __init__(self, value: StoredValue, nbytes: int, key: str = "") -> None:
        self.value = value
        self.nbytes = nbytes
        self.key = key or f"local-{os.getpid()}-{next(_counter)}"
        self.stored: tuple[object, Handle] | None = None
        """The session of a shared store (see `Store`) and the handle of the same value in it, after
        the value was put there."""

    def fetch(self) -> StoredValue:
        return self.value

    @staticmethod
    def fetch_many(handles: Sequence[LocalHandle]) -> list[StoredValue]:
        return [handle.value for handle in handles]

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[LocalHandle], tuple[StoredValue, int, str]]:
        return LocalHandle, (self.value, self.nbytes, self.key)


def fetch_many(handles: Sequence[Handle]) -> list[StoredValue]:
    """Return the values of any handles, in order, waiting once for each class of handle."""
    found: list[StoredValue] = [None] * len(handles)
    for kind in {type(handle) for handle in handles}:
        at = [i for i, handle in enumerate(handles) if type(handle) is kind]
        for i, value in zip(at, kind.fetch_many([handles[i] for i in at]), strict=True):
            found[i] = value
    return found


def snapshot(value: StoredValue) -> StoredValue:
    """Return a private copy of a payload or of any value that can be copied."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.copy()
    if type(value) is tuple:
        return tuple([snapshot(v) for v in value])
    if type(value) is dict:
        return {k: snapshot(v) for k, v in value.items()}
    return copy.deepcopy(value)


class InProcessStore:
    """Keeps each value in its handle: the store of a process without a backend."""

    in_process = True

    def put(self, value: StoredValue, nbytes: int = 0) -> Handle:
        return LocalHandle(snapshot(value), nbytes)

    def put_many(self, values: Sequence[tuple[StoredValue, int]]) -> list[Handle]:
        return [self.put(value, nbytes) for value, nbytes in values]


_process_store: Store = InProcessStore()
_context_store: ContextVar[Store | None] = ContextVar("quadriga_store", default=None)


def current_store() -> Store:
    """Return the store that `pack_result`, `pack_argument` and `parallel_put` use by default."""
    return _context_store.get() or _process_store


def set_process_store(store: Store) -> None:
    """Make `store` the current store of the whole process. A worker does so at its start."""
    global _process_store
    _process_store = store


@contextmanager
def use_store(store: Store) -> Iterator[None]:
    """Make `store` the current one in a `with` block, for this thread and tasks that it starts."""
    token = _context_store.set(store)
    try:
        yield
    finally:
        _context_store.reset(token)


def parallel_put(objects: Sequence[StoredValue], max_workers: int | None = None) -> list[Handle]:
    """Put several objects into the current store from threads. Handles are returned in order."""
    store = current_store()
    if not objects:
        return []
    workers = max_workers or min(16, len(objects))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(store.put, objects))


@dataclass(frozen=True, slots=True)
class Transport:
    """What a backend knows of its own pickler.

    `types`: objects that only this pickler can encode, because it counts them (references, actor
    handles). `is_pickling()`: whether it pickles something in this thread now.
    """

    types: tuple[type, ...]
    is_pickling: Callable[[], bool]


transports: list[Transport] = []
"""The picklers of the backends that are loaded in this process."""


def is_transport_pickling() -> bool:
    """Return whether a backend pickles a call or a result, and so counts the handles in it."""
    return any(transport.is_pickling() for transport in transports)


@dataclass(slots=True)
class Traffic:
    """Counters of the bytes that this process received and stored.

    `fetched_*`: rows copied into this process out of stored shards or messages, exactly those
    rows; `stored_*`: what this process put into its store; `cut_bytes`: of the fetched rows, those
    that the node of the shard cut out and sent.
    """

    fetched_bytes: int = 0
    fetched_fields: int = 0
    stored_bytes: int = 0
    stored_objects: int = 0
    cut_bytes: int = 0

    def add(self, **more: int) -> None:
        """Add to the counters with these names. Thread-safe."""
        with _counting:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)

    def reset(self) -> Traffic:
        """Set all counts to zero and return their previous values."""
        counts = replace(self)
        self.add(**{name: -number for name, number in asdict(counts).items()})
        return counts

    def __reduce__(self) -> str:
        # A worker class of a script is sent with the globals that it names: the receiver counts in
        # its own `traffic`.
        return "traffic"


_counting = threading.Lock()
traffic = Traffic()


Array: TypeAlias = NDArray[np.generic]
Ints: TypeAlias = NDArray[np.int64]
Stored: TypeAlias = "Array | tuple[Array, Ints] | dict[str, Stored]"
"""A payload (see `values`), as this module sees it."""


def cut(payload: Stored, rows: Ints) -> Stored:
    """Return the payload of these rows (numbers in the stored payload), in their order."""
    if isinstance(payload, dict):
        return {key: cut(child, rows) for key, child in payload.items()}
    if isinstance(payload, tuple):
        return _ragged(*payload, rows)
    return payload.take(rows, axis=0)


def _ragged(values: Array, offsets: Ints, rows: Ints) -> tuple[Array, Ints]:
    ends = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(offsets[rows + 1] - offsets[rows], out=ends[1:])
    taken = np.empty((int(ends[-1]), *values.shape[1:]), dtype=values.dtype)
    for at, row in enumerate(rows.tolist()):
        taken[ends[at] : ends[at + 1]] = values[offsets[row] : offsets[row + 1]]
    return taken, ends


def payload_bytes(payload: Stored) -> int:
    """Return the bytes of a payload."""
    if isinstance(payload, dict):
        return sum(map(payload_bytes, payload.values()))
    if isinstance(payload, tuple):
        return sum(int(array.nbytes) for array in payload)
    return int(payload.nbytes)
