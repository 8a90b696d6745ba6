"""Store a local value once while it is unchanged, however many calls receive it.

A batch on the controller is sent to several calls in turn. Each call splits it, so the objects that
are packed are new views each time. A view of rows is therefore noted with its source and its rows,
and the handles of stored rows are kept with the source:

    x = batch.batch["x"]       6 rows, split for 2 ranks
    first call     x[0:3] → put, handle h0    x[3:6] → put, handle h1
                   kept for x: {(0, 3): h0, (3, 6): h1}
    second call    x[0:3] → h0                x[3:6] → h1

A handle is used again only if the bytes are equal. A tensor whose version counter has changed was
written into. Other writes leave the counter as it is (through `x.numpy()`, `x.data`, or the array
from which x was made), so the bytes are compared as well. Comparing reads both copies: it takes
about as long as a put into memory of the store that was used before, and less than a put into fresh
memory (docs/measurements). What it always saves is the memory of a second copy, and its way to
other nodes. Handles are dropped with the source, and the oldest first if those of a source
name more than twice its rows, or all together more than `KEPT_STORED_BYTES`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import torch

from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol import rows
from quadriga.protocol.encoding import decode, encode
from quadriga.protocol.rows import Plans, RowMap, RowRange, RowSelection, Shard, runs
from quadriga.protocol.storage import (
    CONTROLLER,
    Handle,
    IdentityMap,
    LocalHandle,
    Origin,
    RowRequest,
    Store,
    fetch_many,
    inherit,
    is_row_handle,
    is_transport_pickling,
    mark,
    traffic,
)
from quadriga.protocol.values import (
    FieldSpec,
    LocalValue,
    Payload,
    clone_value,
    concat_values,
    jagged_parts,
    nbytes_of,
    row_count,
    same_values,
    take_value,
)

Rows = tuple[int, int]
NOTED_BYTES = 64 * 1024
"""Views up to this size are not noted: if they are sent at all, then in a message."""
KEPT_STORED_BYTES = 2**30
"""A process keeps handles of at most this many bytes for calls that may follow."""
_COMPARED_ITEMS = 2**17  # of 8 bytes: 1 MiB at a time, which stays in the cache of the processor


class _Copy(NamedTuple):
    """Stored rows: their handle and the version counter of the value when they were stored."""

    spec: FieldSpec
    handle: Handle
    version: int


_Key = tuple[object, Rows]  # session (see `session_of`) and rows


class _Copies(dict[_Key, _Copy]):
    """The stored rows of one source, the oldest first, and the sum of their numbers."""

    rows: int = 0

    def drop(self, key: _Key) -> None:
        if self.pop(key, None) is not None:
            self.rows -= key[1][1] - key[1][0]


_parts: IdentityMap[tuple[LocalValue, Rows]] = IdentityMap()
"""View → its source and rows. The entry keeps the source, as any view keeps its base."""
_sources: IdentityMap[_Copies] = IdentityMap()


class _Kept:
    """All stored rows with their bytes, the oldest first; those of dead sources included."""

    def __init__(self) -> None:
        self._entries: deque[tuple[weakref.ref[_Copies], _Key, int]] = deque()
        self._nbytes = 0

    def add(self, copies: _Copies, key: _Key, nbytes: int) -> None:
        """Add stored rows, and drop the oldest above `KEPT_STORED_BYTES`."""
        self._entries.append((weakref.ref(copies), key, nbytes))
        self._nbytes += nbytes
        while self._nbytes > KEPT_STORED_BYTES or (self._entries and not self._entries[0][0]()):
            reference, old_key, old_nbytes = self._entries.popleft()
            self._nbytes -= old_nbytes
            owner = reference()
            if owner is not None:
                owner.drop(old_key)


_kept = _Kept()
_lock = threading.RLock()
"""Held while rows are noted: several threads of a controller may send one batch. A garbage
collection inside may end a stream of the user whose last statement sends one, too."""


def note_part(part: LocalValue, source: LocalValue, rows: RowRange) -> None:
    """Note that `part` is a view of these rows of `source`, unless it is too small to be stored."""
    if part is not source and nbytes_of(part) > NOTED_BYTES:
        _parts[part] = source, (rows.start, rows.stop)


def find_stored(
    value: LocalValue, spec: FieldSpec, payload: Payload, session: object
) -> Handle | None:
    """Return the handle of the same bytes in the store of `session`, None if there is none."""
    source, rows = source_of(value)
    copies = _sources.get(source)
    copy = None if copies is None else copies.get((session, rows))
    if copy is None or copy.spec != spec or copy.version != _version(value):
        return None
    try:
        stored = copy.handle.fetch()
    except LostObjectError:
        return None
    return copy.handle if _same_bytes(payload, stored) else None


def remember_stored(value: LocalValue, spec: FieldSpec, handle: Handle, session: object) -> None:
    """Keep the handle of a value that was just stored in the store of `session`."""
    source, rows = source_of(value)
    key = session, rows
    with _lock:
        copies = _sources.get(source)
        if copies is None:
            copies = _sources[source] = _Copies()
        copies.drop(key)
        copies[key] = _Copy(spec, handle, _version(value))
        copies.rows += rows[1] - rows[0]
        while len(copies) > 1 and copies.rows > 2 * row_count(source):
            copies.drop(next(iter(copies)))
        _kept.add(copies, key, handle.nbytes)


def source_of(value: LocalValue) -> tuple[LocalValue, Rows]:
    """Return the source of a view of rows, and these rows; the value itself if it is no view."""
    return _parts.get(value) or (value, (0, row_count(value)))


def session_of(store: Store) -> object:
    """Return what identifies the stored values: stores of one Ray cluster share them."""
    return getattr(store, "session", id(store))


def in_store(handle: Handle, store: Store) -> Handle:
    """Return a handle of the same value in `store`, if this process holds it and it is large.

    Several messages may need the same bytes: those of the parts of one batch, for example.
    """
    if not isinstance(handle, LocalHandle) or handle.nbytes <= NOTED_BYTES:
        return handle
    known = session_of(store)
    if handle.stored is None or handle.stored[0] != known:
        traffic.stored(handle.nbytes)
        handle.stored = known, store.put(handle.value, handle.nbytes)
    return handle.stored[1]


def _version(value: LocalValue) -> int:
    """Return the version counter of a tensor, which views share; 0 where there is none."""
    if not isinstance(value, torch.Tensor):
        return 0
    tensor = jagged_parts(value)[0] if value.is_nested else value
    return 0 if tensor.is_inference() else tensor._version


def _same_bytes(a: Payload, b: Payload) -> bool:
    """Return whether two contiguous payloads have the same bytes: NaNs too, and -0.0 is not 0.0."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return all(map(_same_bytes, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return all(_same_bytes(a[key], b[key]) for key in a)
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return False
    if a.dtype != b.dtype or a.shape != b.shape or a.dtype == object:
        return False
    bytes_a, bytes_b = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    whole = len(bytes_a) // 8 * 8
    items_a, items_b = bytes_a[:whole].view(np.int64), bytes_b[:whole].view(np.int64)
    same_items = all(
        np.array_equal(items_a[i : i + _COMPARED_ITEMS], items_b[i : i + _COMPARED_ITEMS])
        for i in range(0, len(items_a), _COMPARED_ITEMS)
    )
    return same_items and np.array_equal(bytes_a[whole:], bytes_b[whole:])


CutRows = tuple[RowMap, dict[int, Payload]]
"""What was cut for one column: the row map into the payloads, and the payloads by shard."""


def cut_rows(fields: Sequence[tuple[RowMap, Sequence[Handle]]]) -> list[CutRows]:
    """Ask for rows of the columns, given as `(row map, handles)`, waiting once for all of them.

    A shard that is not in the payloads of the result is to be fetched as a whole.
    """
    asked: dict[type, list[tuple[int, int, RowRequest]]] = {}
    for number, (row_map, handles) in enumerate(fields):
        for shard, request in _wanted(row_map, handles):
            asked.setdefault(type(request.handle), []).append((number, shard, request))
    payloads: list[dict[int, Payload]] = [{} for _ in fields]
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


def _renumbered(row_map: RowMap, payloads: dict[int, Payload]) -> RowMap:
    """Return a map in which the rows of a cut shard are numbered in the order of the batch."""
    shard_of, row_of = row_map.expand()
    for shard in payloads:
        mine = shard_of == shard
        row_of[mine] = np.arange(np.count_nonzero(mine))
    return RowMap(row_map.shards, runs(shard_of, row_of))


def lost_field(
    fields: Sequence[tuple[str, RowMap, tuple[Handle, ...]]], error: LostObjectError
) -> LostObjectError:
    """Return the error that names field, role, rank and method of the first value that is lost."""
    # A value that is late is not waited for a second time.
    late: Sequence[str] = getattr(error, "late", ())
    for key, row_map, handles in fields:
        for shard, handle in zip(row_map.shards, handles, strict=True):
            if handle.key not in late and (late or not _is_lost(handle)):
                continue
            origin = shard.origin
            reason = (
                f"did not arrive ({error})"
                if late
                else "that node, or the process that called for them, no longer runs. Read a field "
                "before that, or compute it again"
            )
            return LostObjectError(
                f"field '{key}' is lost: its {shard.rows} rows were produced by {origin.role} "
                f"rank {origin.rank} in {origin.method or 'the controller'} on node "
                f"{origin.node or 'unknown'}, and {reason}",
                field=key, role=origin.role, rank=origin.rank,
                method=origin.method, node=origin.node,
            )  # fmt: skip
    return error


def _is_lost(handle: Handle) -> bool:
    try:
        handle.fetch()
    except LostObjectError:
        return True
    return False


_filling = threading.Lock()


# Two ranks produced 3 rows each of the fields x and y in one call, and stored them. The batch of 6
# rows has two columns, which share one row map and have one handle for each shard:
#
#     row map   shards (s0, s1), segments [[0, 0, 3], [1, 0, 3]]
#     x         handles (x in s0, x in s1)
#     y         handles (y in s0, y in s1)
#
#     batch[3:5]:  row map  shards (s1,), segments [[0, 0, 2]]
#                  x        handles (x in s1,)           the handles of s0 are dropped: if no other
#                  y        handles (y in s1,)           batch has them, the store releases s0
#
#     batch.rename("x", "z") of a part, concatenated with a part that has the handles of y under the
#     name z: shard s0 has two different handles under z, so the result lists s0 twice.


class RemoteColumn:
    """A field of `len(row_map)` rows, with one handle for each shard of `row_map`."""

    __slots__ = ("_value", "handles", "row_map", "spec")

    def __init__(self, spec: FieldSpec, row_map: RowMap, handles: tuple[Handle, ...]) -> None:
        self.spec = spec
        self.row_map = row_map
        self.handles = handles
        self._value: LocalValue | None = None

    @property
    def value(self) -> LocalValue | None:
        """The value if the column was read, else None."""
        return self._value

    def read(self, key: str) -> LocalValue:
        """Return the value, private to this process. The first read fetches it."""
        if self._value is not None:
            return self._value
        handles = self.handles
        if len(handles) == 1 and type(handles[0]) is LocalHandle:
            return self._fill([handles[0].value])
        return fetch([(key, self)])[0]

    def _fill(self, payloads: Sequence[Payload], row_map: RowMap | None = None) -> LocalValue:
        """Decode the payloads, keep the value and drop the handles.

        `row_map`: where the rows are in the payloads, if not where they are in the shards. Several
        threads may decode at the same time; all of them return the value that was kept first.
        """
        # Decoding takes long and is done outside the lock, which guards the assignment only: one
        # lock for all columns is enough, and no thread waits for the decoding of another column.
        value, nbytes = decode(self.spec, row_map or self.row_map, payloads)
        with _filling:
            if self._value is None:
                traffic.fetched(nbytes)
                mark(value, [shard.origin for shard in self.row_map.shards])
                self._value = value
                self.handles = ()
            return self._value

    def nbytes(self) -> int:
        """Return the bytes of these rows: exact for dense fields, in proportion for ragged ones."""
        if self._value is not None:
            return nbytes_of(self._value)
        shards = self.row_map.shards
        if len(self.handles) == 1 and len(self.row_map) == shards[0].rows:
            return self.handles[0].nbytes
        total = 0.0
        for shard, start, stop in self.row_map.segments.tolist():
            total += self.handles[shard].nbytes * (stop - start) / shards[shard].rows
        return round(total)

    def unread(self) -> RemoteColumn:
        """Return another column over the same stored values, which is read separately."""
        return RemoteColumn(self.spec, self.row_map, self.handles)

    def has_local_payloads(self) -> bool:
        """Return whether all stored values of the column are in this process."""
        return all(isinstance(handle, LocalHandle) for handle in self.handles)

    def __reduce__(self) -> tuple[object, ...]:
        column = self if self._value is None else as_remote("", self._value)
        return RemoteColumn, (column.spec, column.row_map, column.handles)


Column: TypeAlias = LocalValue | RemoteColumn
Columns: TypeAlias = Mapping[str, Column]


class Selections:
    """Selections of rows, and the row maps that they give, for columns that share a map.

    One selection may be of any kind, several are ranges.
    """

    def __init__(self, selections: Sequence[RowSelection]) -> None:
        self.all = selections
        self._row_maps: dict[int, list[tuple[RowMap, tuple[int, ...]]]] = {}
        self._plans: Plans = {}

    def of(self, row_map: RowMap) -> list[tuple[RowMap, tuple[int, ...]]]:
        """Return `row_map.take` of the selections."""
        found = self._row_maps.get(id(row_map))
        if found is None:
            found = self._row_maps[id(row_map)] = row_map.take(self.all, self._plans)
        return found


def is_remote(column: object) -> TypeGuard[RemoteColumn]:
    """Return True for a column that was not read yet."""
    return type(column) is RemoteColumn and column.value is None


def local_value(column: Column) -> LocalValue:
    """Return the value of a column that is not remote."""
    if isinstance(column, RemoteColumn):
        assert column.value is not None, "a remote column has no local value"
        return column.value
    return column


def read(column: Column, key: str) -> LocalValue:
    """Return the value of any column; fetch it if necessary."""
    return column.read(key) if isinstance(column, RemoteColumn) else column


def row_map_of_shard(length: int, origin: Origin) -> RowMap:
    """Return the map of a new shard of `length` rows that is about to be stored."""
    return RowMap.of_shard(Shard.new(length, origin))


def fetch(columns: Iterable[tuple[str, RemoteColumn]]) -> list[LocalValue]:
    """Read several columns, waiting once for all of them. Each stored value is fetched once."""
    # Handles are collected first: another thread that reads a column drops them.
    wanted = [(key, column, column.handles) for key, column in columns]
    unread = [(column, handles) for _, column, handles in wanted if column.value is None]
    if any(is_row_handle(handle) for _, handles in unread for handle in handles):
        cuts = cut_rows([(column.row_map, handles) for column, handles in unread])
    else:
        cuts = [(column.row_map, {}) for column, _ in unread]
    # Columns may share stored values: x of a batch and x of a slice of it have equal keys.
    unique: dict[str, Handle] = {}
    for (_, handles), (_, cut) in zip(unread, cuts, strict=True):
        for shard, handle in enumerate(handles):
            if shard not in cut:
                unique.setdefault(handle.key, handle)
    try:
        found = dict(zip(unique, fetch_many(list(unique.values())), strict=True))
    except LostObjectError as error:
        places = [(key, column.row_map, handles) for key, column, handles in wanted]
        raise lost_field(places, error) from error
    for (column, handles), (row_map, cut) in zip(unread, cuts, strict=True):
        payloads = [
            cut[shard] if shard in cut else found[handle.key]
            for shard, handle in enumerate(handles)
        ]
        column._fill(payloads, row_map)
    return [column.read(key) for key, column, _ in wanted]


def same(a: Column, b: Column, key: str) -> bool:
    """Return whether two columns have equal values, as `same_values` compares them.

    Nothing is fetched if both are the same stored rows.
    """
    if is_remote(a) and is_remote(b) and (a is b or _same_reference(a, b)):
        return True
    return same_values(read(a, key), read(b, key))


def _same_reference(a: RemoteColumn, b: RemoteColumn) -> bool:
    return (
        a.spec == b.spec
        and [handle.key for handle in a.handles] == [handle.key for handle in b.handles]
        and (a.row_map is b.row_map or np.array_equal(a.row_map.segments, b.row_map.segments))
    )


def take(fields: Columns, selections: Selections) -> list[dict[str, Column]]:
    """Return for each selection its rows of every column."""
    parts: list[dict[str, Column]] = [{} for _ in selections.all]
    for key, column in fields.items():
        # Read before the check: another thread that reads the column drops its handles.
        handles = column.handles if isinstance(column, RemoteColumn) else ()
        if is_remote(column):
            for part, (row_map, kept) in zip(parts, selections.of(column.row_map), strict=True):
                taken = tuple([handles[shard] for shard in kept])
                part[key] = RemoteColumn(column.spec, row_map, taken)
            continue
        value = local_value(column)
        for part, selection in zip(parts, selections.all, strict=True):
            part[key] = take_local(value, selection)
    return parts


def take_local(value: LocalValue, selection: RowSelection) -> LocalValue:
    """Return the selected rows of a local value."""
    taken = inherit(take_value(value, selection), (value,))
    if isinstance(selection, RowRange):
        note_part(taken, value, selection)
    return taken


def concat(parts: Sequence[Columns]) -> dict[str, Column]:
    """Return the rows of all parts in order, for each column of the first part.

    A column that is remote in one of the parts is remote in the result: parts that are local are
    referenced as snapshots.
    """
    joined: dict[tuple[int, ...], tuple[RowMap, list[tuple[int, int]]]] = {}
    result: dict[str, Column] = {}
    for key in parts[0]:
        fields = [part[key] for part in parts]
        if not any(map(is_remote, fields)):
            values = [local_value(column) for column in fields]
            whole = concat_values(values, key)
            result[key] = inherit(whole, values) if len(values) > 1 else whole
            continue
        remote = [c if is_remote(c) else snapshot_as_remote(key, local_value(c)) for c in fields]
        spec = _common_spec(key, [c.spec for c in remote if len(c.row_map)] or [remote[0].spec])
        # Dtypes differ, and only the values can be promoted: int64 and float32 rows become float32.
        if spec is None:
            result[key] = concat_values(fetch([(key, column) for column in remote]), key)
            continue
        maps = tuple(id(column.row_map) for column in remote)
        if maps not in joined:
            joined[maps] = rows.concat([column.row_map for column in remote])
        row_map, sources = joined[maps]
        if len(row_map.shards) < sum(len(c.handles) for c in remote) and not _same_handles(remote):
            row_map, sources = rows.concat([column.row_map for column in remote], share=False)
        handles = tuple([remote[part].handles[shard] for part, shard in sources])
        result[key] = RemoteColumn(spec, row_map, handles)
    return result


def _same_handles(columns: Sequence[RemoteColumn]) -> bool:
    """Return whether a shard that several parts share has one handle in all of them.

    It has not if two fields of one shard are concatenated under one name, after a rename.
    """
    seen: dict[int, str] = {}
    return all(
        seen.setdefault(shard.uid, handle.key) == handle.key
        for column in columns
        for shard, handle in zip(column.row_map.shards, column.handles, strict=True)
    )


def _common_spec(key: str, specs: Sequence[FieldSpec]) -> FieldSpec | None:
    """Return one spec for all parts, None if the values themselves have to be concatenated."""
    first = specs[0]
    if all(spec is first or spec == first for spec in specs):
        return first
    # A part without a GPU and a part with one: the result is placed on the GPU when it is read.
    device = next((spec.device for spec in specs if spec.device != "cpu"), "cpu")
    on_device = [replace(spec, device=device) for spec in specs]
    if all(spec == on_device[0] for spec in on_device):
        return on_device[0]
    if any(spec.tail != first.tail for spec in specs):
        shapes = ", ".join(f"[*, {str(list(s.tail))[1:-1]}] {s.dtype}" for s in specs)
        raise FieldError(
            f"the parts of field '{key}' cannot be concatenated along the batch dimension: "
            f"{shapes}",
            field=key,
        )
    if all(spec.kind == "array" for spec in specs):
        return replace(first, dtype=np.result_type(*[np.dtype(s.dtype) for s in specs]).str)
    return None


def as_remote(key: str, value: LocalValue, origin: Origin = CONTROLLER) -> RemoteColumn:
    """Return a local value as a column over a `LocalHandle`. They may share memory."""
    spec, payload, nbytes = encode(value, key)
    row_map = row_map_of_shard(row_count(value), origin)
    handles = (LocalHandle(payload, nbytes),) if row_map.shards else ()
    return RemoteColumn(spec, row_map, handles)


def snapshot_as_remote(key: str, value: LocalValue, origin: Origin = CONTROLLER) -> RemoteColumn:
    """Return a snapshot of a local value as a column over a `LocalHandle`."""
    return as_remote(key, clone_value(value), origin)


def without_unused_rows(key: str, column: RemoteColumn) -> RemoteColumn:
    """Return a column with local payloads, without stored rows that its row map does not name."""
    if column.spec.kind == "raw" or column.nbytes() >= sum(h.nbytes for h in column.handles):
        return column.unread()
    shards = column.row_map.shards
    origin = shards[0].origin if shards else CONTROLLER
    return snapshot_as_remote(key, column.unread().read(key), origin)


def for_message(key: str, column: RemoteColumn, store: Store) -> RemoteColumn:
    """Return a remote column as it is sent in a call or a result.

    References are sent as they are. Bytes that are in this process are sent in the message if they
    are few; otherwise they are put into `store`, once for all messages that need them.
    """
    if store.in_process or LocalHandle not in set(map(type, column.handles)):
        return column.unread()
    if column.has_local_payloads() and column.nbytes() <= NOTED_BYTES:
        return without_unused_rows(key, column)
    raw = column.spec.kind == "raw"
    handles = [h if raw else in_store(h, store) for h in column.handles]
    return RemoteColumn(column.spec, column.row_map, tuple(handles))


def for_pickle(key: str, column: Column) -> RemoteColumn:
    """Return a column as it is pickled outside a message.

    Its bytes are pickled too, unless a backend pickles it together with its handles: no store
    counts a handle in the bytes of `pickle.dumps`, so it would release the value.
    """
    if not is_remote(column):
        return as_remote(key, local_value(column))
    if column.has_local_payloads():
        return without_unused_rows(key, column)
    return column if is_transport_pickling() else as_remote(key, column.unread().read(key))


def private(column: Column) -> Column:
    """Return a deep copy of a local value; references cannot change and are shared."""
    return column.unread() if is_remote(column) else clone_value(local_value(column))
