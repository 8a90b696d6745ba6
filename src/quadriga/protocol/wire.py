"""A batch under way: every field a column, the small ones with their bytes along.

`pack` makes the columns, `unpack` makes a batch of its own from them, and `reduce` is how a
`DataProto` is pickled. Fields above `INLINE_BYTES` go to the store, so a message stays small
whatever the batch weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from quadriga.protocol import batches, values
from quadriga.protocol import column as columns
from quadriga.protocol.column import RefColumn, compact, whole_block
from quadriga.protocol.flat import Flat, flatten, restore
from quadriga.protocol.layout import Rows
from quadriga.protocol.plain import freeze_leaf, thaw_leaf, walk
from quadriga.protocol.refarrays import RefArrays
from quadriga.protocol.refbatch import RefBatch
from quadriga.protocol.reference import Handle, HereHandle, Origin, Store, snapshot
from quadriga.protocol.serialization import FieldSpec, Payload, freeze
from quadriga.protocol.thaw import device_here
from quadriga.protocol.traffic import traffic

if TYPE_CHECKING:
    from quadriga.protocol.dataproto import DataProto

INLINE_BYTES = 64 * 1024
"""A field of a shard up to this size travels inside the message; above, it goes to the store."""

Head = tuple[tuple[int, ...], str | None]
Keep = Callable[[Payload, int, FieldSpec], Handle]


def pack(data: DataProto, origin: Origin, store: Store) -> DataProto:
    """The batch as it crosses: no live tensor in it, large fields in `store`."""
    keep = partial(_keep, store)
    rows = whole_block(len(data), origin)

    def pack_column(key: str, column: Any) -> RefColumn:
        if columns.is_remote(column):
            return _pack_reference(key, column, store)
        return _freeze_column(key, columns.local(column), rows, keep)

    batch = None
    if data.batch is not None:
        fields = {k: pack_column(k, c) for k, c in batches.tensor_columns(data.batch).items()}
        batch = RefBatch(fields, data.batch.batch_size, data.batch.device)
    arrays = batches.array_columns(data.non_tensor_batch)
    leaf = partial(freeze_leaf, private=store.in_process)
    return type(data)(
        batch,
        RefArrays({key: pack_column(key, column) for key, column in arrays.items()}),
        walk(data.meta_info, leaf),
    )


def _freeze_column(key: str, value: Any, rows: Rows, keep: Keep) -> RefColumn:
    spec, payload, nbytes = freeze(value, key)
    return RefColumn(spec, rows, (keep(payload, nbytes, spec),) if rows.blocks else ())


def _keep(store: Store, payload: Payload, nbytes: int, spec: FieldSpec) -> Handle:
    if nbytes <= INLINE_BYTES or spec.kind == "raw":
        return HereHandle(snapshot(payload), nbytes)
    traffic.stored(nbytes)
    return store.put(payload, nbytes)


def _pack_reference(key: str, column: RefColumn, store: Store) -> RefColumn:
    """A reference passes as it is. Bytes that it holds here go along when few, else to the store,
    once for all messages that need them."""
    if store.in_process or not any(isinstance(h, HereHandle) for h in column.handles):
        return column.fresh()
    if columns.is_carried(column) and column.nbytes() <= INLINE_BYTES:
        return compact(key, column)
    handles = tuple(_move(handle, column.spec, store) for handle in column.handles)
    return RefColumn(column.spec, column.rows, handles)


def _move(handle: Handle, spec: FieldSpec, store: Store) -> Handle:
    if not isinstance(handle, HereHandle) or handle.nbytes <= INLINE_BYTES or spec.kind == "raw":
        return handle
    if handle.stored is None:
        traffic.stored(handle.nbytes)
        handle.stored = store.put(handle.value, handle.nbytes)
    return handle.stored


def unpack(data: DataProto) -> DataProto:
    """A batch of its own: small fields that came along become local values, all others are fetched
    when they are read."""
    batch = None
    if data.batch is not None:
        fields = {k: _unpack_column(k, c) for k, c in batches.tensor_columns(data.batch).items()}
        batch = batches.make_batch(data.batch, fields, len(data))
    arrays = batches.array_columns(data.non_tensor_batch)
    return type(data)(
        batch,
        batches.make_arrays({key: _unpack_column(key, column) for key, column in arrays.items()}),
        walk(data.meta_info, thaw_leaf),
    )


def _unpack_column(key: str, column: Any) -> Any:
    if not columns.is_remote(column):
        return values.clone(columns.local(column))
    column = column.fresh()
    if columns.is_carried(column) and column.nbytes() <= INLINE_BYTES:
        return column.read(key)
    return column


def reduce(data: DataProto) -> tuple[Any, ...]:
    """How a `DataProto` is pickled: flat columns, whose buffers go out of band, and `meta_info`."""
    tensors = batches.tensor_columns(data.batch)
    arrays = batches.array_columns(data.non_tensor_batch)
    live = not all(columns.is_remote(c) for half in (tensors, arrays) for c in half.values())
    head = None if data.batch is None else _head(data.batch)
    meta = walk(data.meta_info, freeze_leaf)
    return _rebuild, (type(data), head, flatten(tensors), flatten(arrays), meta, live)


def _rebuild(
    kind: type[DataProto], head: Head | None, tensors: Flat, arrays: Flat, meta: Any, live: bool
) -> DataProto:
    batch = None if head is None else _rebuild_batch(head, tensors)
    data = kind(batch, _rebuild_arrays(arrays), meta)
    return unpack(data) if live else data


def reduce_batch(batch: RefBatch) -> tuple[Any, ...]:
    """How a `RefBatch` is pickled when it travels alone."""
    return _rebuild_batch, (_head(batch), flatten(batch.columns))


def reduce_arrays(arrays: RefArrays) -> tuple[Any, ...]:
    """How a `RefArrays` is pickled when it travels alone."""
    return _rebuild_arrays, (flatten(arrays.columns),)


def _head(batch: Any) -> Head:
    return tuple(batch.batch_size), None if batch.device is None else batch.device.type


def _rebuild_batch(head: Head, tensors: Flat) -> RefBatch:
    size, device = head
    return RefBatch(restore(tensors), size, None if device is None else device_here(device))


def _rebuild_arrays(arrays: Flat) -> RefArrays:
    return RefArrays(restore(arrays))
