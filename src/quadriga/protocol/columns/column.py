"""`RemoteColumn`, a field whose bytes are stored in shards, and operations on columns.

A *column* of a batch is a local value or a `RemoteColumn`. The first read of a remote column
fetches and decodes its rows, keeps the value and drops the handles.
Batches that share the column (through `select`, `union`, `rename`) see the same value, as they
would see the same local tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias, TypeGuard

import numpy as np

from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol.columns.cut_rows import CutRows, cut_rows
from quadriga.protocol.columns.lost_fields import named
from quadriga.protocol.values import operations, rows, stored_once
from quadriga.protocol.values.decode import decode
from quadriga.protocol.values.encode import encode
from quadriga.protocol.values.field_spec import FieldSpec, LocalValue, Payload
from quadriga.protocol.values.rows import Plans, RowMap, RowRange, RowSelection, Shard
from quadriga.protocol.values.storage import (
    CONTROLLER,
    Handle,
    LocalHandle,
    Origin,
    Store,
    fetch_many,
    inherit,
    is_row_handle,
    is_transport_pickling,
    mark,
    traffic,
)

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
            return operations.nbytes(self._value)
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


@dataclass(slots=True)
class TakeCache:
    """Row maps that one operation has computed, for columns that share a map or its segments."""

    row_maps: dict[int, tuple[RowMap, tuple[int, ...]]] = field(default_factory=dict)
    plans: Plans = field(default_factory=dict)


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
        cuts = [CutRows(column.row_map) for column, _ in unread]
    # Columns may share stored values: x of a batch and x of a slice of it have equal keys.
    unique: dict[str, Handle] = {}
    for (_, handles), cut in zip(unread, cuts, strict=True):
        for shard, handle in enumerate(handles):
            if shard not in cut.payloads:
                unique.setdefault(handle.key, handle)
    try:
        found = dict(zip(unique, fetch_many(list(unique.values())), strict=True))
    except LostObjectError as error:
        places = [(key, column.row_map, handles) for key, column, handles in wanted]
        raise named(places, error) from error
    for (column, handles), cut in zip(unread, cuts, strict=True):
        payloads = [
            cut.payloads[shard] if shard in cut.payloads else found[handle.key]
            for shard, handle in enumerate(handles)
        ]
        column._fill(payloads, cut.row_map)
    return [column.read(key) for key, column, _ in wanted]


def same(a: Column, b: Column, key: str) -> bool:
    """Return whether two columns have equal values, as `operations.same_values` compares them.

    Nothing is fetched if both are the same stored rows.
    """
    if is_remote(a) and is_remote(b) and (a is b or _same_reference(a, b)):
        return True
    return operations.same_values(read(a, key), read(b, key))


def _same_reference(a: RemoteColumn, b: RemoteColumn) -> bool:
    return (
        a.spec == b.spec
        and [handle.key for handle in a.handles] == [handle.key for handle in b.handles]
        and (a.row_map is b.row_map or np.array_equal(a.row_map.segments, b.row_map.segments))
    )


def take(columns: Columns, selection: RowSelection, cache: TakeCache) -> dict[str, Column]:
    """Return the selected rows of every column; columns that share a row map share the result."""
    taken: dict[str, Column] = {}
    for key, column in columns.items():
        # Read before the check: another thread that reads the column drops its handles.
        handles = column.handles if isinstance(column, RemoteColumn) else ()
        if not is_remote(column):
            taken[key] = take_local(local_value(column), selection)
            continue
        found = cache.row_maps.get(id(column.row_map))
        if found is None:
            found = column.row_map.take(selection, cache.plans)
            cache.row_maps[id(column.row_map)] = found
        row_map, kept = found
        taken[key] = RemoteColumn(column.spec, row_map, tuple([handles[s] for s in kept]))
    return taken


def chunk(
    fields: Columns, bounds: Sequence[int], plans: rows.ChunkPlans
) -> list[dict[str, Column]]:
    """Return the rows from each bound to the next, of every column. `plans`: see `RowMap.chunk`."""
    parts: list[dict[str, Column]] = [{} for _ in bounds[1:]]
    maps: dict[int, list[tuple[RowMap, tuple[int, ...]]]] = {}
    for key, column in fields.items():
        handles = column.handles if isinstance(column, RemoteColumn) else ()
        if not is_remote(column):
            value = local_value(column)
            for part, (start, stop) in zip(parts, pairwise(bounds), strict=True):
                part[key] = take_local(value, RowRange(start, stop))
            continue
        found = maps.get(id(column.row_map))
        if found is None:
            found = maps[id(column.row_map)] = column.row_map.chunk(bounds, plans)
        for part, (row_map, kept) in zip(parts, found, strict=True):
            part[key] = RemoteColumn(column.spec, row_map, tuple([handles[s] for s in kept]))
    return parts


def take_local(value: LocalValue, selection: RowSelection) -> LocalValue:
    """Return the selected rows of a local value."""
    taken = inherit(operations.take(value, selection), (value,))
    if isinstance(selection, RowRange):
        stored_once.note_part(taken, value, selection)
    return taken


def concat(parts: Sequence[Columns]) -> dict[str, Column]:
    """Return the rows of all parts in order, for each column of the first part.

    A column that is remote in one of the parts is remote in the result: parts that are local are
    referenced as snapshots.
    """
    cache: dict[tuple[int, ...], tuple[RowMap, list[tuple[int, int]]]] = {}
    result: dict[str, Column] = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        if any(is_remote(column) for column in columns):
            result[key] = _concat_remote(key, columns, cache)
        else:
            values = [local_value(column) for column in columns]
            joined = operations.concat(values, key)
            result[key] = inherit(joined, values) if len(values) > 1 else joined
    return result


def _concat_remote(
    key: str,
    parts: Sequence[Column],
    cache: dict[tuple[int, ...], tuple[RowMap, list[tuple[int, int]]]],
) -> Column:
    columns = [c if is_remote(c) else snapshot_as_remote(key, local_value(c)) for c in parts]
    spec = _common_spec(key, [c.spec for c in columns if len(c.row_map)] or [columns[0].spec])
    # Dtypes differ, and only the values can be promoted: int64 and float32 rows become float32.
    if spec is None:
        return operations.concat(fetch([(key, column) for column in columns]), key)
    maps = tuple(id(column.row_map) for column in columns)
    found = cache.get(maps)
    if found is None:
        found = cache[maps] = rows.concat([column.row_map for column in columns])
    row_map, sources = found
    if len(row_map.shards) < sum(len(c.handles) for c in columns) and not _same_handles(columns):
        row_map, sources = rows.concat([column.row_map for column in columns], share=False)
    return RemoteColumn(spec, row_map, tuple([columns[p].handles[s] for p, s in sources]))


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
    row_map = row_map_of_shard(operations.row_count(value), origin)
    handles = (LocalHandle(payload, nbytes),) if row_map.shards else ()
    return RemoteColumn(spec, row_map, handles)


def snapshot_as_remote(key: str, value: LocalValue, origin: Origin = CONTROLLER) -> RemoteColumn:
    """Return a snapshot of a local value as a column over a `LocalHandle`."""
    return as_remote(key, operations.clone(value), origin)


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
    if column.has_local_payloads() and column.nbytes() <= stored_once.NOTED_BYTES:
        return without_unused_rows(key, column)
    raw = column.spec.kind == "raw"
    handles = [h if raw else stored_once.in_store(h, store) for h in column.handles]
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
    return column.unread() if is_remote(column) else operations.clone(local_value(column))
