"""A batch under way: small fields with their bytes, the others as references.

`pack` makes the message, `unpack` makes a batch of its own from it, and the `reduce` functions are
how batches are pickled when they travel on their own. Fields above `INLINE_BYTES` go to the store,
so a message stays small whatever the batch weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quadriga.protocol import batches
from quadriga.protocol import column as columns
from quadriga.protocol.column import RefColumn, is_carried, is_remote, whole_block
from quadriga.protocol.layout import Rows
from quadriga.protocol.plain import freeze_leaf, thaw_leaf, walk
from quadriga.protocol.provenance import mark
from quadriga.protocol.refarrays import RefArrays
from quadriga.protocol.refbatch import RefBatch
from quadriga.protocol.reference import CONTROLLER, Handle, HereHandle, Origin, Store, snapshot
from quadriga.protocol.serialization import FieldSpec, Payload, freeze
from quadriga.protocol.thaw import device_here, thaw
from quadriga.protocol.traffic import traffic

if TYPE_CHECKING:
    from quadriga.protocol.dataproto import DataProto

INLINE_BYTES = 64 * 1024
"""A field of a shard up to this size travels inside the message; above, it goes to the store."""


@dataclass(slots=True)
class Inline:
    """A field of all rows of the message whose bytes come along."""

    spec: FieldSpec
    payload: Payload
    nbytes: int


Entries = dict[str, Inline | RefColumn]


@dataclass(slots=True)
class Packed:
    """One batch as it crosses. `kind`: its class, None for `DataProto`; `head`: batch size and
    kind of device of its tensor half, None when it has none; `rows`: the layout of fields that this
    message brings."""

    kind: type[DataProto] | None
    head: tuple[tuple[int, ...], str | None] | None
    rows: Rows
    tensors: Entries
    arrays: Entries
    meta: Any

    def __reduce__(self) -> tuple[Any, ...]:
        from quadriga.protocol.flat import flatten, restore

        return restore, flatten(self)


def pack(data: DataProto, origin: Origin, store: Store) -> Packed:
    """The batch as it crosses: no live tensor in it, large fields in `store`."""
    packer = _Packer(whole_block(len(data), origin), store)
    packed = _message(data, packer.rows, packer.entry, store.in_process)
    packer.store_waiting()
    return packed


def _message(data: DataProto, rows: Rows, entry: Any, private: bool) -> Packed:
    from quadriga.protocol.dataproto import DataProto

    batch = data.batch
    head = None
    if batch is not None:
        head = tuple(batch.batch_size), None if batch.device is None else batch.device.type
    arrays = batches.array_columns(data.non_tensor_batch)
    return Packed(
        None if type(data) is DataProto else type(data),
        head,
        rows,
        {key: entry(key, column) for key, column in batches.tensor_columns(batch).items()},
        {key: entry(key, column) for key, column in arrays.items()},
        walk(data.meta_info, partial(freeze_leaf, private=private)) if data.meta_info else {},
    )


class _Packer:
    """Makes the entries of one message; what goes to the store goes there in one call."""

    def __init__(self, rows: Rows, store: Store) -> None:
        self.rows, self.store = rows, store
        self._waiting: list[tuple[RefColumn, Payload, int]] = []

    def entry(self, key: str, column: Any) -> Inline | RefColumn:
        if is_remote(column):
            return _pass_on(key, column, self.store)
        spec, payload, nbytes = freeze(columns.local(column), key)
        if nbytes <= INLINE_BYTES or spec.kind == "raw" or not self.rows.blocks:
            # A payload may share the live tensor's memory, and pickling comes later or never.
            private = spec.kind != "raw" or self.store.in_process
            return Inline(spec, snapshot(payload) if private else payload, nbytes)
        stored = RefColumn(spec, self.rows, ())
        self._waiting.append((stored, payload, nbytes))
        return stored

    def store_waiting(self) -> None:
        """Puts what is large into the store."""
        if not self._waiting:
            return
        handles = self.store.put_many([(payload, nbytes) for _, payload, nbytes in self._waiting])
        for (stored, _, nbytes), handle in zip(self._waiting, handles, strict=True):
            stored.handles = (handle,)
            traffic.stored(nbytes)


def _pass_on(key: str, column: RefColumn, store: Store) -> Inline | RefColumn:
    """A reference passes as it is. Bytes that it holds here go along when few, else to the store,
    once for all messages that need them."""
    if store.in_process or not any(isinstance(h, HereHandle) for h in column.handles):
        return column.fresh()
    if is_carried(column) and column.nbytes() <= INLINE_BYTES:
        return columns.compact(key, column)
    handles = tuple(_move(handle, column.spec, store) for handle in column.handles)
    return RefColumn(column.spec, column.rows, handles)


def _move(handle: Handle, spec: FieldSpec, store: Store) -> Handle:
    if not isinstance(handle, HereHandle) or handle.nbytes <= INLINE_BYTES or spec.kind == "raw":
        return handle
    if handle.stored is None:
        traffic.stored(handle.nbytes)
        handle.stored = store.put(handle.value, handle.nbytes)
    return handle.stored


def unpack(packed: Packed) -> DataProto:
    """A batch of its own: small fields that came along become local values, all others are fetched
    when they are read."""
    from quadriga.protocol.dataproto import DataProto

    batch = None
    if packed.head is not None:
        size, device = packed.head
        tensors = _columns(packed.tensors, packed.rows)
        batch = batches.batch_of(tensors, size, None if device is None else device_here(device))
    arrays = batches.make_arrays(_columns(packed.arrays, packed.rows)) if packed.arrays else {}
    meta = walk(packed.meta, thaw_leaf) if packed.meta else {}
    return (packed.kind or DataProto)(batch, arrays, meta)


def _columns(entries: Entries, rows: Rows) -> dict[str, Any]:
    return {key: _open(key, entry, rows) for key, entry in entries.items()}


def _open(key: str, entry: Inline | RefColumn, rows: Rows) -> Any:
    if isinstance(entry, RefColumn):
        column = entry.fresh()
        small = is_carried(column) and column.nbytes() <= INLINE_BYTES
        return column.read(key) if small else column
    if entry.nbytes > INLINE_BYTES and rows.blocks:
        return RefColumn(entry.spec, rows, (HereHandle(entry.payload, entry.nbytes),))
    value, nbytes = thaw(entry.spec, rows, [entry.payload])
    traffic.fetched(nbytes)
    mark(value, [block.origin for block in rows.blocks])
    return value


def reduce(data: DataProto) -> tuple[Any, ...]:
    """How a `DataProto` is pickled: what is here goes along, its buffers out of band."""
    return unpack, (_message(data, whole_block(len(data), CONTROLLER), _hold, False),)


def _hold(key: str, column: Any) -> Inline | RefColumn:
    if is_remote(column):
        return columns.compact(key, column) if is_carried(column) else column
    return Inline(*freeze(columns.local(column), key))


def reduce_batch(batch: RefBatch) -> tuple[Any, ...]:
    """How a `RefBatch` is pickled when it travels alone."""
    from quadriga.protocol.dataproto import DataProto

    return _batch_alone, reduce(DataProto(batch))[1]


def reduce_arrays(arrays: RefArrays) -> tuple[Any, ...]:
    """How a `RefArrays` is pickled when it travels alone."""
    from quadriga.protocol.dataproto import DataProto

    return _arrays_alone, reduce(DataProto(None, arrays))[1]


def _batch_alone(packed: Packed) -> Any:
    return unpack(packed).batch


def _arrays_alone(packed: Packed) -> Mapping[str, Any]:
    return unpack(packed).non_tensor_batch
