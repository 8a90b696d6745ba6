"""Stored values: handles, stores, who wrote a value, traffic counters, and row maps. No torch.

The protocol does not know Ray. A backend provides a `Store`; a `Handle` is what its `put` returns.

A remote batch has a `RowMap`, which says where its rows are stored. No operation on it reads or
moves a stored byte. Fields that were produced by one call share one `RowMap`, so a selection is
computed once for all of them.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import LengthError

StoredValue: TypeAlias = Any
"""What was put into a store: a payload, or any picklable value of a user."""


PLAIN_TYPES: frozenset[type] = frozenset((str, bytes, int, float, bool, complex, type(None)))
"""Types whose values contain no other value and cannot change."""
_SEQUENCES = (list, tuple, set, frozenset)


def importable_spec(module: str) -> ModuleSpec | None:
    """Return what the importers find for the name of a module, as if it had not been imported."""
    parent = module.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(module, path)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
        if spec is not None:
            return spec
    return None


def walk(value: Any, leaf: Callable[[Any], object]) -> Any:
    """Rebuild nested containers with `leaf` applied to every value that is not a container.

    Containers are lists, tuples, named tuples, sets and dicts of these exact types, and
    `OrderedDict` and `defaultdict`. Values of plain types are kept without a call of `leaf`.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if kind is dict or kind is OrderedDict:
        return kind((k, walk(v, leaf)) for k, v in value.items())
    if kind in _SEQUENCES:
        if PLAIN_TYPES.issuperset(map(type, value)):  # built in C, 10 ns an item
            return kind(value)
        return kind(walk(v, leaf) for v in value)
    if kind is defaultdict:
        return kind(value.default_factory, {k: walk(v, leaf) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(walk(v, leaf) for v in value))
    return leaf(value)


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

    __slots__ = ("__weakref__", "_key", "nbytes", "stored", "value")

    def __init__(self, value: StoredValue, nbytes: int, key: str = "") -> None:
        self.value = value
        self.nbytes = nbytes
        self._key = key
        self.stored: tuple[object, Handle] | None = None
        """The session of a shared store (see `Store`) and the handle of the same value in it, after
        the value was put there."""

    @property
    def key(self) -> str:
        self._key = self._key or f"local-{os.getpid()}-{next(_counter)}"
        return self._key

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


# Rows of a batch, and where they are stored

RowSelection: TypeAlias = range | Ints
"""Rows of a batch: consecutive ones (a range of step 1; a view of local tensors), or their numbers
in any order ([M] int64, repeats allowed; a copy)."""


def chunk_bounds(length: int, chunks: int, uneven: bool) -> list[int]:
    """Return the `chunks + 1` row numbers at which a batch is split.

    Raises `LengthError` when `length` does not divide and `uneven` is False. With `uneven` the
    first chunks have one row more.
    """
    if chunks < 1:
        raise LengthError(f"expected at least 1 part to split a batch into, got {chunks}")
    size, rest = divmod(length, chunks)
    if rest and not uneven:
        raise LengthError(
            f"{length} rows do not divide into {chunks} equal parts: "
            f"{length} = {chunks} × {size} + {rest}. Remove {rest} or add {chunks - rest} rows, or "
            "allow padding with DataProto.from_dict(..., auto_padding=True) or "
            "DataProtoConfig.auto_padding = True"
        )
    return [i * size + min(i, rest) for i in range(chunks + 1)]


# A shard is the rows that one rank produced and stored. A segment is a run of consecutive rows of
# one shard. Two ranks stored shards of 3 rows, a0 a1 a2 and b0 b1 b2; their batch has 6 rows:
#
#     batch row       0   1   2   3   4   5
#     stored row     a0  a1  a2  b0  b1  b2        segments [[0, 0, 3],   shard 0, rows 0, 1, 2
#                    └── segment ┘└── segment ┘              [1, 0, 3]]   shard 1, rows 0, 1, 2
#
#     take range(2, 5)               a2  b0  b1              [[0, 2, 3], [1, 0, 2]]
#     take rows [5, 0, 1]            b2  a0  a1              [[1, 2, 3], [0, 0, 2]]
#     take range(3, 6)               b0  b1  b2              [[0, 0, 3]]: shard a is dropped, and b
#                                                            gets the index 0
#     concat of rows [0, 2), [2, 6)  a0 a1 | a2 b0 b1 b2     [[0, 0, 3], [1, 0, 3]]: the segments
#                                                            [0, 0, 2] and [0, 2, 3] are merged


class Shard(NamedTuple):
    """The rows that one rank stored: a number that no other shard has, its rows, its writer."""

    uid: int
    rows: int
    origin: Origin

    @staticmethod
    def new(rows: int, origin: Origin) -> Shard:
        """Return a shard with a new number: 64 random bits, unique over all processes."""
        return Shard(int.from_bytes(os.urandom(8), "little"), rows, origin)


Plan: TypeAlias = tuple[Ints, tuple[int, ...]]
"""The segments of a selection, and the indices of the shards that they need, in ascending order."""


class RowMap:
    """Where each row of a batch is stored; see the drawing above.

    `segments` [S, 3] int64 in batch order: index of the shard, first row, row after the last.
    """

    def __init__(self, shards: tuple[Shard, ...], segments: Ints) -> None:
        self.shards = shards
        self.segments = segments

    @staticmethod
    def of_shard(shard: Shard) -> RowMap:
        """Return the map of all rows of one shard, in order."""
        if shard.rows == 0:
            return RowMap((), _NO_SEGMENTS)
        return RowMap((shard,), np.array([[0, 0, shard.rows]], dtype=np.int64))

    @cached_property
    def offsets(self) -> Ints:
        """[S + 1]: the batch row at which each segment starts; the last entry is the length."""
        ends = np.zeros(len(self.segments) + 1, dtype=np.int64)
        np.cumsum(self.segments[:, 2] - self.segments[:, 1], out=ends[1:])
        return ends

    @cached_property
    def starts(self) -> list[int]:
        """`offsets` as a list, in which Python finds a row five times as fast as numpy does."""
        return cast(list[int], self.offsets.tolist())

    @cached_property
    def content(self) -> bytes:
        """The segments as bytes: equal for maps that differ in their shards only."""
        return self.segments.tobytes()

    def __len__(self) -> int:
        if len(self.segments) == 1:
            return int(self.segments[0, 2] - self.segments[0, 1])
        return self.starts[-1]

    def __reduce__(self) -> tuple[object, ...]:
        return row_map_of, self.flat()

    def flat(self) -> tuple[object, ...]:
        """Return the arguments of `row_map_of`: tuples of numbers and strings, and bytes."""
        shards = tuple([(shard.uid, shard.rows, *shard.origin) for shard in self.shards])
        return shards, self.segments.tobytes()

    def expand(self) -> tuple[Ints, Ints]:
        """Return the shard index and the row in that shard of each batch row: two arrays [N]."""
        lengths = np.diff(self.offsets)
        shift = np.repeat(self.segments[:, 1] - self.offsets[:-1], lengths)
        rows = np.arange(len(self), dtype=np.int64) + shift
        return np.repeat(self.segments[:, 0], lengths), rows

    def take(self, plan: Plan) -> RowMap:
        """Return the map of a selection from its plan; the shards are renumbered."""
        segments, kept = plan
        return RowMap(tuple([self.shards[s] for s in kept]), segments)

    def plan(self, selection: RowSelection) -> Plan:
        """Return the segments of the selected rows and the shards that they need."""
        if isinstance(selection, range):
            start, stop = selection.start, selection.stop
            if start == stop:
                return _NO_SEGMENTS, ()
            first = bisect_right(self.starts, start) - 1
            last = bisect_left(self.starts, stop)
            if last - first == 1:
                shard, low, _ = self.segments[first].tolist()
                low += start - self.starts[first]
                return np.array([[0, low, low + stop - start]], dtype=np.int64), (shard,)
            # [2, 5) of segments a [0, 3) and b [0, 3): a loses its first 2 rows, b its last 6 - 5.
            segments = self.segments[first:last].copy()
            segments[0, 1] += start - self.starts[first]
            segments[-1, 2] -= self.starts[last] - stop
        elif len(selection) == 0:
            return _NO_SEGMENTS, ()
        else:
            # The last segment that starts at or before a row contains that row.
            which = self.offsets.searchsorted(selection, side="right") - 1
            rows = self.segments[which, 1] + selection - self.offsets[which]
            segments = runs(self.segments[which, 0], rows)
        numbers = segments[:, 0].tolist()
        kept = tuple(sorted(set(numbers)))
        if kept[-1] != len(kept) - 1:
            new = {number: i for i, number in enumerate(kept)}
            segments[:, 0] = [new[number] for number in numbers]
        return segments, kept


_NO_SEGMENTS: Ints = np.empty((0, 3), dtype=np.int64)


def row_map_of(shards: Iterable[tuple[Any, ...]], segments: bytes) -> RowMap:
    """Return the row map of a flat form."""
    known = tuple([Shard(uid, rows, Origin(*origin)) for uid, rows, *origin in shards])
    return RowMap(known, np.frombuffer(segments, dtype=np.int64).reshape(-1, 3))


def concat_maps(
    parts: Sequence[RowMap], share: bool = True
) -> tuple[RowMap, list[tuple[int, int]]]:
    """Concatenate maps in order.

    Return the map, and for each of its shards the `(part, shard index in that part)` from which it
    is taken. With `share` a shard that several parts name is listed once.
    """
    shards: list[Shard] = []
    sources: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    numbers: list[int] = []
    # Parts that were chunked from one batch name the same shards. A shard is known by its uid, so
    # concatenating all chunks again gives a map with as many shards as the batch had.
    for p, part in enumerate(parts):
        for s, shard in enumerate(part.shards):
            at = known.get(shard.uid) if share else None
            if at is None:
                at = known[shard.uid] = len(shards)
                shards.append(shard)
                sources.append((p, s))
            numbers.append(at)
    return RowMap(tuple(shards), _joined(parts, numbers)), sources


def _joined(parts: Sequence[RowMap], numbers: Sequence[int]) -> Ints:
    """Join segments with renumbered shards; merge those that continue each other."""
    joined: list[list[int]] = []
    base = 0
    for part in parts:
        for shard, start, stop in part.segments.tolist():
            at = numbers[base + shard]
            if joined and joined[-1][0] == at and joined[-1][2] == start:
                joined[-1][2] = stop
            else:
                joined.append([at, start, stop])
        base += len(part.shards)
    return np.array(joined, dtype=np.int64).reshape(-1, 3)


def runs(shard: Ints, row: Ints) -> Ints:
    """Return the segments of single rows: a new one wherever a row does not follow the previous.

    shard [0, 0, 1], row [0, 1, 4] has a break before index 2: [[0, 0, 2], [1, 4, 5]].
    """
    breaks = np.flatnonzero((shard[1:] != shard[:-1]) | (row[1:] != row[:-1] + 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(row)])) - 1
    return np.stack((shard[starts], row[starts], row[ends] + 1), axis=1)


CutRows = tuple[RowMap, dict[int, StoredValue]]
"""What was cut for one column: the row map into the payloads, and the payloads by shard."""


def cut_rows(fields: Sequence[tuple[RowMap, Sequence[Handle]]]) -> list[CutRows]:
    """Ask for rows of the columns, given as `(row map, handles)`, waiting once for all of them.

    A shard that is not in the payloads of the result is to be fetched as a whole.
    """
    asked: dict[type, list[tuple[int, int, RowRequest]]] = {}
    for number, (row_map, handles) in enumerate(fields):
        for shard, request in _wanted(row_map, handles):
            asked.setdefault(type(request.handle), []).append((number, shard, request))
    payloads: list[dict[int, StoredValue]] = [{} for _ in fields]
    for mine in asked.values():
        found = mine[0][2].handle.fetch_rows([request for _, _, request in mine])
        for (number, shard, _), payload in zip(mine, found, strict=True):
            if payload is not None:
                payloads[number][shard] = payload
    return [
        (_renumbered(m, cut) if cut else m, cut)
        for (m, _), cut in zip(fields, payloads, strict=True)
    ]


def _wanted(row_map: RowMap, handles: Sequence[Handle]) -> list[tuple[int, RowRequest]]:
    """Return the shards of which to ask for rows, with the rows."""
    # pays(0.0) is False for every shard of this node, most often for all of them.
    candidates = [(s, h) for s, h in enumerate(handles) if is_row_handle(h) and h.pays(0.0)]
    if not candidates:
        return []
    shard_of, row_of = row_map.expand()
    wanted = [(s, handle, row_of[shard_of == s]) for s, handle in candidates]
    return [
        (s, RowRequest(handle, rows))
        for s, handle, rows in wanted
        if handle.pays(len(rows) / row_map.shards[s].rows)
    ]


def _renumbered(row_map: RowMap, payloads: dict[int, StoredValue]) -> RowMap:
    """Return a map in which the rows of a cut shard are numbered in the order of the batch."""
    shard_of, row_of = row_map.expand()
    for shard in payloads:
        mine = shard_of == shard
        row_of[mine] = np.arange(np.count_nonzero(mine))
    return RowMap(row_map.shards, runs(shard_of, row_of))
