"""One field that lies elsewhere, and operations on sets of fields some of which do.

`RemoteColumn` is a cell: the first read fetches the field, keeps it and lets the handles go, and every
batch that shares the column (through `select`, `union`, `rename`) sees the same value, as it would
with a local tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol.values import operations as values
from quadriga.protocol.values import row_map as layout
from quadriga.protocol.values.decode import decode
from quadriga.protocol.values.encode import encode
from quadriga.protocol.values.field_spec import FieldSpec
from quadriga.protocol.values.provenance import inherit, mark
from quadriga.protocol.values.row_map import Block, Plans, Rows, new_uid
from quadriga.protocol.values.row_selection import RowOp
from quadriga.protocol.values.storage import CONTROLLER, Handle, LocalHandle, Origin, fetch_many
from quadriga.protocol.values.traffic import traffic

Fields = Mapping[str, Any]  # key to RemoteColumn or to a local value
_UNREAD: Any = object()
_opening = threading.Lock()


@dataclass(slots=True)
class Composed:
    """Work that one operation did already, for fields that share a layout or its segments."""

    layouts: dict[int, tuple[Rows, tuple[int, ...]]] = field(default_factory=dict)
    plans: Plans = field(default_factory=dict)


class RemoteColumn:
    """A field of `len(rows)` rows: row `i` is found through `rows` in the value of a handle,
    one handle a block of `rows`."""

    __slots__ = ("_value", "handles", "rows", "spec")

    def __init__(self, spec: FieldSpec, rows: Rows, handles: tuple[Handle, ...]) -> None:
        self.spec = spec
        self.rows = rows
        self.handles = handles
        self._value = _UNREAD

    @property
    def is_here(self) -> bool:
        """True once the field was read."""
        return self._value is not _UNREAD

    def read(self, key: str) -> Any:
        """The field's value, private to this process; fetched at the first read."""
        if self._value is not _UNREAD:
            return self._value
        if len(self.handles) == 1 and type(self.handles[0]) is LocalHandle:
            self._open([self.handles[0].value])
        else:
            fetch([(key, self)])
        return self._value

    def _open(self, payloads: Sequence[Any]) -> None:
        """Builds the value from the fetched payloads, keeps it and lets the stored ones go.
        Of several threads that read at once, all see what the first has built."""
        if self.is_here:
            return
        value, nbytes = decode(self.spec, self.rows, payloads)
        with _opening:
            if self.is_here:
                return
            traffic.fetched(nbytes)
            mark(value, [block.origin for block in self.rows.blocks])
            self._value = value
            self.handles = ()

    def nbytes(self) -> int:
        """Bytes of these rows: exact for dense fields, in proportion for ragged ones."""
        if self.is_here:
            return values.nbytes(self._value)
        if len(self.handles) == 1 and len(self.rows) == self.rows.blocks[0].rows:
            return self.handles[0].nbytes
        total = 0.0
        for block, start, stop in self.rows.segments.tolist():
            total += self.handles[block].nbytes * (stop - start) / self.rows.blocks[block].rows
        return round(total)

    def fresh(self) -> RemoteColumn:
        """A cell of its own over the same stored values."""
        return RemoteColumn(self.spec, self.rows, self.handles)

    def __reduce__(self) -> tuple[Any, ...]:
        held = hold("", self._value) if self.is_here else self
        return RemoteColumn, (held.spec, held.rows, held.handles)


def whole_block(length: int, origin: Origin) -> Rows:
    """The layout of a shard of `length` rows that is about to be stored."""
    return Rows.whole(Block(new_uid(), length, origin))


def local(column: Any) -> Any:
    """The value of a column that is here; a `RemoteColumn` when it is not."""
    if type(column) is RemoteColumn and column._value is not _UNREAD:
        return column._value
    return column


def is_remote(column: Any) -> bool:
    """True for a field that was not read yet."""
    return type(column) is RemoteColumn and column._value is _UNREAD


def is_carried(column: RemoteColumn) -> bool:
    """True when a column's stored values are all in this process."""
    return all(isinstance(handle, LocalHandle) for handle in column.handles)


def fetch(columns: Iterable[tuple[str, RemoteColumn]]) -> None:
    """Reads several fields, waiting once for all of them. Each stored value is asked for once."""
    # The handles are taken first: another thread that reads the column lets them go.
    wanted = [(key, column, column.handles) for key, column in columns]
    wanted = [entry for entry in wanted if not entry[1].is_here]
    unique: dict[str, Handle] = {}
    for _, _, handles in wanted:
        for handle in handles:
            unique.setdefault(handle.key, handle)
    try:
        found = dict(zip(unique, fetch_many(list(unique.values())), strict=True))
    except LostObjectError as error:
        raise _find_lost(wanted, error) from error
    for _, column, handles in wanted:
        column._open([found[handle.key] for handle in handles])


def _find_lost(
    columns: Sequence[tuple[str, RemoteColumn, tuple[Handle, ...]]], error: LostObjectError
) -> LostObjectError:
    """The error that names field, role, rank and method of the first value that is gone."""
    for key, column, handles in columns:
        for block, handle in zip(column.rows.blocks, handles, strict=True):
            try:
                handle.fetch()
            except LostObjectError:
                origin = block.origin
                return LostObjectError(
                    f"field '{key}' is gone: its {block.rows} rows were made by {origin.role} "
                    f"rank {origin.rank} in {origin.method or 'the control flow'} on node "
                    f"{origin.node or 'unknown'}, and that process no longer runs. Read a field "
                    "before its maker is stopped, or compute it again",
                    field=key, role=origin.role, rank=origin.rank,
                    method=origin.method, node=origin.node,
                )  # fmt: skip
    return error


def same(a: Any, b: Any, key: str) -> bool:
    """Equal values; fetches nothing when both are the same rows of the same stored values."""
    if is_remote(a) and is_remote(b) and (a is b or _same_reference(a, b)):
        return True
    return values.same(*(c.read(key) if isinstance(c, RemoteColumn) else c for c in (a, b)))


def _same_reference(a: RemoteColumn, b: RemoteColumn) -> bool:
    return (
        a.spec == b.spec
        and [h.key for h in a.handles] == [h.key for h in b.handles]
        and (a.rows is b.rows or np.array_equal(a.rows.segments, b.rows.segments))
    )


def take(fields: Fields, op: RowOp, composed: Composed) -> dict[str, Any]:
    """The chosen rows of every field; one composition for all fields that share a layout, kept in
    `composed` while one operation lasts."""
    taken: dict[str, Any] = {}
    for key, column in fields.items():
        held = column.handles if type(column) is RemoteColumn else ()
        if not is_remote(column):
            taken[key] = take_local(local(column), op)
            continue
        found = composed.layouts.get(id(column.rows))
        if found is None:
            found = composed.layouts[id(column.rows)] = column.rows.take(op, composed.plans)
        rows, kept = found
        taken[key] = RemoteColumn(column.spec, rows, tuple([held[b] for b in kept]))
    return taken


def take_local(value: Any, op: RowOp) -> Any:
    """The chosen rows of a local value."""
    return inherit(values.take(value, op), (value,))


def concat_local(parts: Sequence[Any], key: str) -> Any:
    """Rows of all local values in order."""
    return inherit(values.concat(parts, key), parts) if len(parts) > 1 else parts[0]


def concat(parts: Sequence[Fields]) -> dict[str, Any]:
    """Rows of all parts in order, for each field of the first. Stays elsewhere what lies
    elsewhere; a field that lies here in one part and elsewhere in another goes by reference."""
    joined: dict[tuple[int, ...], tuple[Rows, list[tuple[int, int]]]] = {}
    result = {}
    for key in parts[0]:
        columns = [part[key] for part in parts]
        if any(is_remote(column) for column in columns):
            result[key] = _concat_remote(key, columns, joined)
        else:
            result[key] = concat_local([local(column) for column in columns], key)
    return result


def _concat_remote(
    key: str,
    columns: Sequence[Any],
    joined: dict[tuple[int, ...], tuple[Rows, list[tuple[int, int]]]],
) -> Any:
    lifted = [c if is_remote(c) else lift(key, local(c)) for c in columns]
    spec = _common_spec(key, [c.spec for c in lifted if len(c.rows)] or [lifted[0].spec])
    if spec is None:
        fetch([(key, c) for c in lifted])
        return values.concat([c.read(key) for c in lifted], key)
    layouts = tuple(id(c.rows) for c in lifted)
    found = joined.get(layouts)
    if found is None:
        found = joined[layouts] = layout.concat([c.rows for c in lifted])
    rows, sources = found
    if len(rows.blocks) < sum(len(c.handles) for c in lifted) and not _same_handles(lifted):
        rows, sources = layout.concat([c.rows for c in lifted], share=False)
    return RemoteColumn(spec, rows, tuple(lifted[p].handles[b] for p, b in sources))


def _same_handles(columns: Sequence[RemoteColumn]) -> bool:
    """Whether a block that several parts share has one handle in all of them: after a rename,
    two fields of one block may meet under one key."""
    seen: dict[int, str] = {}
    return all(
        seen.setdefault(block.uid, handle.key) == handle.key
        for column in columns
        for block, handle in zip(column.rows.blocks, column.handles, strict=True)
    )


def _common_spec(key: str, specs: Sequence[FieldSpec]) -> FieldSpec | None:
    """One spec for all parts; None when only the values themselves can be joined."""
    first = specs[0]
    if all(spec is first or spec == first for spec in specs):
        return first
    device = next((s.device for s in specs if s.device != "cpu"), "cpu")
    alike = [replace(s, device=device) for s in specs]
    if all(s == alike[0] for s in alike):
        return alike[0]
    if any(s.tail != first.tail for s in specs):
        shapes = ", ".join(f"[*, {str(list(s.tail))[1:-1]}] {s.dtype}" for s in specs)
        raise FieldError(
            f"the parts of field '{key}' cannot be joined along the batch dimension: {shapes}",
            field=key,
        )
    if all(s.kind == "array" for s in specs):
        return replace(first, dtype=np.result_type(*(np.dtype(s.dtype) for s in specs)).str)
    return None


def hold(key: str, value: Any, origin: Origin = CONTROLLER) -> RemoteColumn:
    """A local value as a column that holds it; may share its memory."""
    spec, payload, nbytes = encode(value, key)
    rows = whole_block(values.row_count(value), origin)
    return RemoteColumn(spec, rows, (LocalHandle(payload, nbytes),) if rows.blocks else ())


def compact(key: str, column: RemoteColumn) -> RemoteColumn:
    """A column over bytes that are here, without the rows that it does not name."""
    if column.spec.kind == "raw" or column.nbytes() >= sum(h.nbytes for h in column.handles):
        return column.fresh()
    origin = column.rows.blocks[0].origin if column.rows.blocks else CONTROLLER
    return lift(key, column.fresh().read(key), origin)


def alone(key: str, column: Any) -> RemoteColumn:
    """A column as it is pickled outside a message: what is here goes along."""
    if not is_remote(column):
        return hold(key, local(column))
    return compact(key, column) if is_carried(column) else column


def private(column: Any) -> Any:
    """A copy of what is here; references are immutable and are shared."""
    return column.fresh() if is_remote(column) else values.clone(local(column))


def lift(key: str, value: Any, origin: Origin = CONTROLLER) -> RemoteColumn:
    """A local value as a column that holds a snapshot of it."""
    return hold(key, values.clone(value), origin)
