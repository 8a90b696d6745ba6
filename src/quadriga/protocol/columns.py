"""Remote fields: the stored values of their rows; how rows are selected, joined and fetched."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeGuard

import numpy as np

from quadriga.errors import LostObjectError
from quadriga.protocol.encoding import decode, encode
from quadriga.protocol.storage import (
    CONTROLLER,
    Handle,
    LocalHandle,
    Origin,
    Plan,
    RowMap,
    RowRequest,
    RowSelection,
    Shard,
    concat_maps,
    fetch_many,
    is_row_handle,
    is_transport_pickling,
    runs,
    traffic,
)
from quadriga.protocol.values import (
    FieldSpec,
    LocalValue,
    Payload,
    clone_value,
    concat_values,
    nbytes_of,
    row_count,
    same_values,
    take_value,
)

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


def _lost_field(
    fields: Sequence[tuple[str, RowMap, tuple[Handle, ...]]], error: LostObjectError
) -> LostObjectError:
    """Return the error that names field, role, rank and method of the first value that is lost."""
    # A value that is late is not waited for a second time.
    late: Sequence[str] = getattr(error, "late", ())
    for key, row_map, handles in fields:
        for shard, handle in zip(row_map.shards, handles, strict=True):
            if handle.key not in late and (late or not _is_lost(handle)):
                continue
            role, rank, method, node = shard.origin
            reason = f"did not arrive ({error})" if late else _ENDED
            return LostObjectError(
                f"field '{key}' is lost: its {shard.rows} rows were produced by {role} "
                f"rank {rank} in {method or 'the controller'} on node {node or 'unknown'}, and "
                f"{reason}",
                field=key, role=role, rank=rank, method=method, node=node,
            )  # fmt: skip
    return error


_ENDED = (
    "that node, or the process that called for them, no longer runs. Read a field before that, or "
    "compute it again"
)


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
    """A field of `len(row_map)` rows, with one handle for each shard of `row_map`.

    `value`: the value after the column was read, private to this process; else None.
    """

    __slots__ = ("handles", "row_map", "spec", "value")

    def __init__(self, spec: FieldSpec, row_map: RowMap, handles: tuple[Handle, ...]) -> None:
        self.spec = spec
        self.row_map = row_map
        self.handles = handles
        self.value: LocalValue | None = None

    def read(self, key: str) -> LocalValue:
        """Return the value. The first read fetches it."""
        return fetch([(key, self)])[0] if self.value is None else self.value

    def fill(self, payloads: Sequence[Payload], row_map: RowMap) -> None:
        """Decode the payloads, keep the value and drop the handles.

        `row_map`: where the rows are in the payloads. Several threads may decode at the same time;
        the value that was kept first stays.
        """
        # Decoding takes long and is done outside the lock, which guards the assignment only: one
        # lock for all columns is enough, and no thread waits for the decoding of another column.
        value, nbytes = decode(self.spec, row_map, payloads)
        with _filling:
            if self.value is None:
                traffic.add(fetched_bytes=nbytes, fetched_fields=1)
                self.value = value
                self.handles = ()

    def nbytes(self) -> int:
        """Return the bytes of these rows: exact for dense fields, in proportion for ragged ones."""
        if self.value is not None:
            return nbytes_of(self.value)
        total = 0.0
        for shard, start, stop in self.row_map.segments.tolist():
            total += self.handles[shard].nbytes * (stop - start) / self.row_map.shards[shard].rows
        return round(total)

    def unread(self) -> RemoteColumn:
        """Return another column over the same stored values, which is read separately."""
        return RemoteColumn(self.spec, self.row_map, self.handles)

    def has_local_payloads(self) -> bool:
        """Return whether all stored values of the column are in this process."""
        return all(isinstance(handle, LocalHandle) for handle in self.handles)

    def __reduce__(self) -> tuple[object, ...]:
        column = self if self.value is None else as_remote("", self.value)
        return RemoteColumn, (column.spec, column.row_map, column.handles)


Column: TypeAlias = LocalValue | RemoteColumn
Columns: TypeAlias = Mapping[str, Column]


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
        raise _lost_field(places, error) from error
    for (column, handles), (row_map, cut) in zip(unread, cuts, strict=True):
        payloads = [
            cut[shard] if shard in cut else found[handle.key]
            for shard, handle in enumerate(handles)
        ]
        column.fill(payloads, row_map)
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


def take(
    halves: Sequence[Columns], selections: Sequence[RowSelection]
) -> list[list[dict[str, Column]]]:
    """Return for each of the halves, for each selection, its rows of every column."""
    # A selection is computed once for all columns that share a row map, and its plan once for all
    # maps with equal segments over different shards, which results of several calls have.
    taken_maps: dict[int, list[tuple[RowMap, tuple[int, ...]]]] = {}
    plans: dict[bytes, list[Plan]] = {}
    found = []
    for columns in halves:
        parts: list[dict[str, Column]] = [{} for _ in selections]
        found.append(parts)
        for key, column in columns.items():
            if isinstance(column, RemoteColumn):
                # Read before the check: another thread that reads the column drops its handles.
                handles, spec, row_map = column.handles, column.spec, column.row_map
                if column.value is None:
                    maps = taken_maps.get(id(row_map))
                    if maps is None:
                        maps = taken_maps[id(row_map)] = _taken_maps(row_map, selections, plans)
                    for part, (taken, kept) in zip(parts, maps, strict=True):
                        part[key] = RemoteColumn(spec, taken, tuple([handles[s] for s in kept]))
                    continue
                column = column.value
            for part, selection in zip(parts, selections, strict=True):
                part[key] = take_value(column, selection)
    return found


def _taken_maps(
    row_map: RowMap, selections: Sequence[RowSelection], plans: dict[bytes, list[Plan]]
) -> list[tuple[RowMap, tuple[int, ...]]]:
    """Return the row map of each selection, and the indices of the shards that it has."""
    found = plans.get(row_map.content)
    if found is None:
        found = plans[row_map.content] = [row_map.plan(selection) for selection in selections]
    return [(row_map.take(plan), plan[1]) for plan in found]


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
            result[key] = concat_values(values, key)
            continue
        remote = [
            c if is_remote(c) else as_remote(key, clone_value(local_value(c))) for c in fields
        ]
        spec = _common_spec([c.spec for c in remote if len(c.row_map)] or [remote[0].spec])
        # Only the values can be promoted, int64 and float32 rows to float32, or refused.
        if spec is None:
            result[key] = concat_values(fetch([(key, column) for column in remote]), key)
            continue
        maps = tuple(id(column.row_map) for column in remote)
        if maps not in joined:
            joined[maps] = concat_maps([column.row_map for column in remote])
        row_map, sources = joined[maps]
        if len(row_map.shards) < sum(len(c.handles) for c in remote) and not _same_handles(remote):
            row_map, sources = concat_maps([column.row_map for column in remote], share=False)
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


def _common_spec(specs: Sequence[FieldSpec]) -> FieldSpec | None:
    """Return one spec for all parts, None if the values themselves have to be concatenated."""
    first = specs[0]
    if all(spec is first or spec == first for spec in specs):
        return first
    # A part without a GPU and a part with one: the result is placed on the GPU when it is read.
    device = next((spec.device for spec in specs if spec.device != "cpu"), "cpu")
    on_device = [spec._replace(device=device) for spec in specs]
    if all(spec == on_device[0] for spec in on_device):
        return on_device[0]
    if all(spec.kind == "array" and spec.tail == first.tail for spec in specs):
        return first._replace(dtype=np.result_type(*[np.dtype(s.dtype) for s in specs]).str)
    return None


def as_remote(key: str, value: LocalValue, origin: Origin = CONTROLLER) -> RemoteColumn:
    """Return a local value as a column over a `LocalHandle`. They may share memory."""
    spec, payload, nbytes = encode(value, key)
    row_map = RowMap.of_shard(Shard.new(row_count(value), origin))
    handles = (LocalHandle(payload, nbytes),) if row_map.shards else ()
    return RemoteColumn(spec, row_map, handles)


def without_unused_rows(key: str, column: RemoteColumn) -> RemoteColumn:
    """Return a column with local payloads, without stored rows that its row map does not name."""
    if column.spec.kind == "raw" or column.nbytes() >= sum(h.nbytes for h in column.handles):
        return column.unread()
    shards = column.row_map.shards
    origin = shards[0].origin if shards else CONTROLLER
    return as_remote(key, column.unread().read(key), origin)


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
