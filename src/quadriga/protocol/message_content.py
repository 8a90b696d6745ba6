"""A batch under way: small fields with their bytes, the others as references.

`pack` makes the message and `unpack` gives what it holds, every part of it private to the receiver;
`carry` makes the message of a batch that is pickled on its own. Fields above `INLINE_BYTES` go to
the store, so a message stays small whatever the batch weighs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as batches
from quadriga.protocol.columns.column import RemoteColumn, is_carried, is_remote, whole_block
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.message import Entries, Inline, Message
from quadriga.protocol.values.decode import decode, device_here
from quadriga.protocol.values.encode import encode
from quadriga.protocol.values.field_spec import FieldSpec, Payload
from quadriga.protocol.values.nested import decode_leaf, encode_leaf, walk
from quadriga.protocol.values.provenance import mark
from quadriga.protocol.values.row_map import Rows
from quadriga.protocol.values.storage import (
    CONTROLLER,
    Handle,
    LocalHandle,
    Origin,
    Store,
    snapshot,
)
from quadriga.protocol.values.traffic import traffic

INLINE_BYTES = 64 * 1024
"""A field of a shard up to this size travels inside the message; above, it goes to the store."""


def pack(contents: Contents, kind: type[Any] | None, origin: Origin, store: Store) -> Message:
    """The batch as it crosses: no live tensor in it, large fields in `store`."""
    packer = _Packer(whole_block(contents.rows, origin), store)
    message = _message(contents, kind, packer.rows, packer.entry, store.in_process)
    packer.store_waiting()
    return message


def _message(
    contents: Contents, kind: type[Any] | None, rows: Rows, entry: Any, private: bool
) -> Message:
    batch, arrays, meta = contents
    head = None
    if batch is not None:
        head = tuple(batch.batch_size), None if batch.device is None else batch.device.type
    return Message(
        kind,
        head,
        rows,
        {key: entry(key, column) for key, column in batches.tensor_columns(batch).items()},
        {key: entry(key, column) for key, column in batches.array_columns(arrays).items()},
        walk(meta, partial(encode_leaf, private=private)) if meta else {},
    )


class _Packer:
    """Makes the entries of one message; what goes to the store goes there in one call."""

    def __init__(self, rows: Rows, store: Store) -> None:
        self.rows, self.store = rows, store
        self._waiting: list[tuple[RemoteColumn, Payload, int]] = []

    def entry(self, key: str, column: Any) -> Inline | RemoteColumn:
        if is_remote(column):
            return _pass_on(key, column, self.store)
        spec, payload, nbytes = encode(columns.local(column), key)
        if nbytes <= INLINE_BYTES or spec.kind == "raw" or not self.rows.blocks:
            # A payload may share the live tensor's memory, and pickling comes later or never.
            private = spec.kind != "raw" or self.store.in_process
            return Inline(spec, snapshot(payload) if private else payload, nbytes)
        stored = RemoteColumn(spec, self.rows, ())
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


def _pass_on(key: str, column: RemoteColumn, store: Store) -> Inline | RemoteColumn:
    """A reference passes as it is. Bytes that it holds here go along when few, else to the store,
    once for all messages that need them."""
    if store.in_process or not any(isinstance(h, LocalHandle) for h in column.handles):
        return column.fresh()
    if is_carried(column) and column.nbytes() <= INLINE_BYTES:
        return columns.compact(key, column)
    handles = tuple(_move(handle, column.spec, store) for handle in column.handles)
    return RemoteColumn(column.spec, column.rows, handles)


def _move(handle: Handle, spec: FieldSpec, store: Store) -> Handle:
    if not isinstance(handle, LocalHandle) or handle.nbytes <= INLINE_BYTES or spec.kind == "raw":
        return handle
    if handle.stored is None:
        traffic.stored(handle.nbytes)
        handle.stored = store.put(handle.value, handle.nbytes)
    return handle.stored


def unpack(message: Message) -> Contents:
    """What a message holds: small fields that came along become local values, all others are
    fetched when they are read."""
    batch = None
    if message.head is not None:
        size, device = message.head
        tensors = _columns(message.tensors, message.rows)
        batch = batches.batch_of(tensors, size, None if device is None else device_here(device))
    arrays = batches.make_arrays(_columns(message.arrays, message.rows)) if message.arrays else {}
    return Contents(batch, arrays, walk(message.meta, decode_leaf) if message.meta else {})


def _columns(entries: Entries, rows: Rows) -> dict[str, Any]:
    return {key: _open(key, entry, rows) for key, entry in entries.items()}


def _open(key: str, entry: Inline | RemoteColumn, rows: Rows) -> Any:
    if isinstance(entry, RemoteColumn):
        column = entry.fresh()
        small = is_carried(column) and column.nbytes() <= INLINE_BYTES
        return column.read(key) if small else column
    if entry.nbytes > INLINE_BYTES and rows.blocks:
        return RemoteColumn(entry.spec, rows, (LocalHandle(entry.payload, entry.nbytes),))
    value, nbytes = decode(entry.spec, rows, [entry.payload])
    traffic.fetched(nbytes)
    mark(value, [block.origin for block in rows.blocks])
    return value


def carry(contents: Contents, kind: type[Any] | None) -> Message:
    """The message of a batch that is pickled on its own: what is here goes along, its buffers out
    of band."""
    return _message(contents, kind, whole_block(contents.rows, CONTROLLER), _hold, False)


def _hold(key: str, column: Any) -> Inline | RemoteColumn:
    if is_remote(column):
        return columns.compact(key, column) if is_carried(column) else column
    return Inline(*encode(columns.local(column), key))
