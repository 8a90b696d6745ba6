"""`Message`: one batch as it is sent, and its pickled form.

`pack` makes the message of a batch: small fields with their bytes, large fields as handles of a
store, so a message stays small whatever the size of the batch. `unpack` returns the contents of a
message, private to the receiver. `pack_for_pickle` makes the message of a batch that is pickled
outside a call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.column import Column, RemoteColumn, is_remote, local_value
from quadriga.protocol.columns.contents import Contents, MetaInfo
from quadriga.protocol.containers import PLAIN_TYPES, walk
from quadriga.protocol.values import stored_once
from quadriga.protocol.values.decode import current_device, decode, decode_leaf
from quadriga.protocol.values.encode import encode, encode_leaf
from quadriga.protocol.values.field_spec import FieldSpec, LocalValue, Payload
from quadriga.protocol.values.rows import RowMap, Shard
from quadriga.protocol.values.storage import (
    CONTROLLER,
    Handle,
    LocalHandle,
    Origin,
    Store,
    mark,
    snapshot,
    traffic,
)

INLINE_BYTES = stored_once.NOTED_BYTES
"""A field of a shard up to this size is sent in the message; a larger one is put into the store."""
_SMALL = 2048
"""Arrays up to this many bytes are pickled as bytes: cheaper than an out-of-band buffer."""

Flat: TypeAlias = tuple[Any, ...]
"""Nested tuples, strings, numbers, bytes, handles and large arrays: pickled without Python code."""


@dataclass(slots=True)
class Inline:
    """A field of all rows of a message whose bytes are in the message."""

    spec: FieldSpec
    payload: Payload
    nbytes: int


Entries = dict[str, Inline | RemoteColumn]


@dataclass(slots=True)
class Message:
    """One batch as it is sent.

    `kind`: the class of the batch, None for `DataProto` itself; `attributes`: what an instance has
    besides the three parts of a batch; `head`: batch size and device type of its tensor half, None
    if it has none; `row_map`: of the fields that this message brings or has put into the store,
    None if all its fields were remote before.
    """

    kind: type[object] | None
    head: tuple[tuple[int, ...], str | None] | None
    row_map: RowMap | None
    tensors: Entries
    arrays: Entries
    meta: MetaInfo
    attributes: MetaInfo

    @property
    def is_plain(self) -> bool:
        """Whether the message has small fields and plain values only: no handle, and no object or
        class of the user."""
        entries = (*self.tensors.values(), *self.arrays.values())
        return (
            self.kind is None
            and all(isinstance(entry, Inline) and entry.spec.kind != "raw" for entry in entries)
            and all(type(value) in PLAIN_TYPES for value in self.meta.values())
            and not self.attributes
        )

    def __reduce__(self) -> tuple[Callable[..., Message], Flat]:
        return _restore, _flatten(self)


def pack(
    contents: Contents,
    kind: type[object] | None,
    attributes: MetaInfo,
    origin: Origin,
    store: Store,
) -> Message:
    """Return the message of a batch that is sent in a call or a result.

    The message contains no live tensor. Large fields are put into `store` in one call, written by
    `origin`.
    """
    row_map: RowMap | None = None
    waiting: list[tuple[RemoteColumn, LocalValue, Payload, int]] = []
    # A result is stored for its receivers only: a method rarely returns the same tensor twice.
    reuse = origin is CONTROLLER
    session: object = None

    def entry(key: str, column: Column) -> Inline | RemoteColumn:
        nonlocal row_map, session
        if is_remote(column):
            return _pass_on(key, column, store)
        if row_map is None:
            row_map = columns.row_map_of_shard(contents.rows, origin)
        value = local_value(column)
        spec, payload, nbytes = encode(value, key, narrow=not store.in_process)
        if nbytes <= INLINE_BYTES or spec.kind == "raw" or not row_map.shards:
            # The payload may share memory with the live tensor, and is pickled later or never.
            private = spec.kind != "raw" or store.in_process
            return Inline(spec, snapshot(payload) if private else payload, nbytes)
        if reuse and session is None:
            session = stored_once.session(store)
        handle = stored_once.find(value, spec, payload, session) if reuse else None
        stored = RemoteColumn(spec, row_map, () if handle is None else (handle,))
        if handle is None:
            waiting.append((stored, value, payload, nbytes))
        return stored

    message = _message(contents, kind, attributes, entry, store.in_process)
    message.row_map = row_map
    # One call for all large fields of the message: a store may put them into one object.
    if waiting:
        handles = store.put_many([(payload, nbytes) for _, _, payload, nbytes in waiting])
        for (stored, value, _, nbytes), handle in zip(waiting, handles, strict=True):
            stored.handles = (handle,)
            traffic.stored(nbytes)
            if reuse:
                stored_once.remember(value, stored.spec, handle, session)
    return message


def pack_for_pickle(contents: Contents, kind: type[object] | None, attributes: MetaInfo) -> Message:
    """Return the message of a batch that is pickled outside a call.

    Local fields are in the message; their buffers are pickled out of band.
    """

    def entry(key: str, column: Column) -> Inline | RemoteColumn:
        if is_remote(column):
            return columns.for_pickle(key, column)
        return Inline(*encode(local_value(column), key))

    message = _message(contents, kind, attributes, entry)
    message.row_map = columns.row_map_of_shard(contents.rows, CONTROLLER)
    return message


def _message(
    contents: Contents,
    kind: type[object] | None,
    attributes: MetaInfo,
    entry: Callable[[str, Column], Inline | RemoteColumn],
    private: bool = False,
) -> Message:
    batch, arrays, meta = contents
    head = None
    if batch is not None:
        head = tuple(batch.batch_size), None if batch.device is None else batch.device.type
    leaf = partial(encode_leaf, private=private)
    return Message(
        kind,
        head,
        None,
        {key: entry(key, column) for key, column in halves.tensor_columns(batch).items()},
        {key: entry(key, column) for key, column in halves.array_columns(arrays).items()},
        walk(meta, leaf) if meta else {},
        walk(attributes, leaf) if attributes else {},
    )


def _pass_on(key: str, column: RemoteColumn, store: Store) -> Inline | RemoteColumn:
    """Return a remote column as it is sent.

    References are sent as they are. Bytes that are in this process are sent in the message if they
    are few; otherwise they are put into the store, once for all messages that need them.
    """
    if store.in_process or not any(isinstance(handle, LocalHandle) for handle in column.handles):
        return column.unread()
    if column.has_local_payloads() and column.nbytes() <= INLINE_BYTES:
        return columns.without_unused_rows(key, column)
    handles = tuple([_stored(handle, column.spec, store) for handle in column.handles])
    return RemoteColumn(column.spec, column.row_map, handles)


def _stored(handle: Handle, spec: FieldSpec, store: Store) -> Handle:
    if not isinstance(handle, LocalHandle) or handle.nbytes <= INLINE_BYTES or spec.kind == "raw":
        return handle
    # Several messages may need the same bytes: those of the parts of one batch, for example.
    session = stored_once.session(store)
    if handle.stored is None or handle.stored[0] != session:
        traffic.stored(handle.nbytes)
        handle.stored = session, store.put(handle.value, handle.nbytes)
    return handle.stored[1]


def unpack(message: Message) -> tuple[Contents, MetaInfo]:
    """Return the contents and the attributes of the batch of a message.

    Small fields in the message become local values; all others are fetched when they are read.
    """
    batch = None
    if message.head is not None:
        size, device = message.head
        tensors = _received(message.tensors, message.row_map)
        batch = halves.tensor_half(
            tensors, size, None if device is None else current_device(device)
        )
    arrays = halves.make_arrays(_received(message.arrays, message.row_map))
    meta = walk(message.meta, decode_leaf) if message.meta else {}
    attributes = walk(message.attributes, decode_leaf) if message.attributes else {}
    return Contents(batch, arrays, meta), attributes


def _received(entries: Entries, row_map: RowMap | None) -> dict[str, Column]:
    return {key: _receive(key, entry, row_map) for key, entry in entries.items()}


def _receive(key: str, entry: Inline | RemoteColumn, row_map: RowMap | None) -> Column:
    if isinstance(entry, RemoteColumn):
        column = entry.unread()
        small = column.has_local_payloads() and column.nbytes() <= INLINE_BYTES
        return column.read(key) if small else column
    assert row_map is not None
    # Above the limit only in a message of `pack_for_pickle`: decoded when the field is read, so a
    # batch that is pickled and only partly read is not copied as a whole.
    if entry.nbytes > INLINE_BYTES and row_map.shards:
        return RemoteColumn(entry.spec, row_map, (LocalHandle(entry.payload, entry.nbytes),))
    value, nbytes = decode(entry.spec, row_map, [entry.payload])
    traffic.fetched(nbytes)
    mark(value, [shard.origin for shard in row_map.shards])
    return value


# A pickler of a transport may call Python for every object that is not of a built-in type, so a
# message is pickled as tuples, strings and bytes. Only handles of a store and large payloads stay
# objects. A batch of 3 rows with a field x that actor rank 0 stored, and a small local field y:
#
#     kind, head   None, ((3,), None)                     a DataProto; batch size and device
#     own          1                                      row map of the fields of this message,
#                                                         None if it brings none
#     row_maps     0: ((17, 3, 0),)                       shards (uid, rows, number of the writer)
#                     (("actor", 0, "make", "10.0.0.1"),) writers
#                     b"..."                              segments [[0, 0, 3]] as bytes
#                  1: ((42, 3, 0),), (("controller", 0, "", ""),), b"..."
#     tensors      ("x", spec, 0, (handle,), None)        row map 0; five items: remote
#                  ("y", spec, 24, ["<i8", (3,), b"..."]) 24 bytes and payload; four items: inline
#
# Each row map is written once, however many fields share it.


def _flatten(message: Message) -> Flat:
    """Return the arguments of `_restore`: the flat form above."""
    row_maps = _RowMaps()
    tensors = _flat_entries(message.tensors, row_maps)
    arrays = _flat_entries(message.arrays, row_maps)
    own = None if message.row_map is None else row_maps.number(message.row_map)
    head = message.kind, message.head, own, tuple(row_maps.flat)
    return *head, tensors, arrays, message.meta, message.attributes


def _restore(
    kind: type[object] | None,
    head: tuple[tuple[int, ...], str | None] | None,
    own: int | None,
    row_maps: Iterable[Flat],
    tensors: Iterable[Flat],
    arrays: Iterable[Flat],
    *rest: MetaInfo,
) -> Message:
    known = [_row_map(*parts) for parts in row_maps]
    fields = _entries(tensors, known), _entries(arrays, known)
    return Message(kind, head, None if own is None else known[own], *fields, *rest)


class _RowMaps:
    """Numbers the row maps of one message."""

    def __init__(self) -> None:
        self.flat: list[Flat] = []
        self._numbers: dict[int, int] = {}

    def number(self, row_map: RowMap) -> int:
        at = self._numbers.get(id(row_map))
        if at is None:
            at = self._numbers[id(row_map)] = len(self.flat)
            self.flat.append(_flat_row_map(row_map))
        return at


def _flat_entries(entries: Entries, row_maps: _RowMaps) -> Flat:
    flat: list[Flat] = []
    for key, entry in entries.items():
        spec = _flat_spec(entry.spec)
        if isinstance(entry, Inline):
            flat.append((key, spec, entry.nbytes, _flat_payload(entry.payload)))
        else:
            handles = tuple([_flat_handle(handle) for handle in entry.handles])
            flat.append((key, spec, row_maps.number(entry.row_map), handles, None))
    return tuple(flat)


def _entries(flat: Iterable[Flat], row_maps: list[RowMap]) -> Entries:
    entries: Entries = {}
    for key, spec, number, content, *remote in flat:
        if remote:
            handles = tuple([_handle(*handle) for handle in content])
            entries[key] = RemoteColumn(_spec(spec), row_maps[number], handles)
        else:
            entries[key] = Inline(_spec(spec), _payload(content), number)
    return entries


def _flat_spec(spec: FieldSpec) -> Flat:
    children = tuple([(key, _flat_spec(child)) for key, child in spec.children])
    return spec.kind, spec.dtype, tuple(spec.tail), spec.device, children, spec.ragged_dim


def _spec(flat: Flat) -> FieldSpec:
    kind, dtype, tail, device, children, ragged_dim = flat
    nested = tuple([(key, _spec(child)) for key, child in children])
    return FieldSpec(kind, dtype, tail, device, nested, ragged_dim)


def _flat_row_map(row_map: RowMap) -> Flat:
    origins: dict[Origin, int] = {}
    shards = tuple(
        [(s.uid, s.rows, origins.setdefault(s.origin, len(origins))) for s in row_map.shards]
    )
    writers = tuple([(o.role, o.rank, o.method, o.node) for o in origins])
    return shards, writers, row_map.content


def _row_map(
    shards: Iterable[tuple[int, int, int]],
    writers: Iterable[tuple[str, int, str, str]],
    segments: bytes,
) -> RowMap:
    origins = [Origin(*writer) for writer in writers]
    return RowMap(
        tuple([Shard(uid, rows, origins[writer]) for uid, rows, writer in shards]),
        np.frombuffer(segments, dtype=np.int64).reshape(-1, 3),
    )


def _flat_handle(handle: Handle) -> Flat:
    """Return `(module and name of the class, *arguments)`; a `LocalHandle` has no class name."""
    if type(handle) is LocalHandle:
        return None, _flat_payload(handle.value), handle.nbytes
    kind = type(handle)
    return (kind.__module__, kind.__qualname__), *handle.__reduce__()[1]


def _handle(kind: tuple[str, str] | None, *arguments: Any) -> Handle:
    if kind is None:
        payload, nbytes = arguments
        return LocalHandle(_payload(payload), nbytes)
    handle: Handle = _handle_class(*kind)(*arguments)
    return handle


@cache
def _handle_class(module: str, name: str) -> Callable[..., Handle]:
    found: Callable[..., Handle] = getattr(importlib.import_module(module), name)
    return found


def _flat_payload(payload: Payload) -> object:
    """Return a payload with small arrays as lists (dtype, shape, bytes); nothing else is a list."""
    if isinstance(payload, np.ndarray):
        if payload.nbytes > _SMALL or payload.dtype == object:
            return payload
        return [payload.dtype.str, payload.shape, payload.tobytes()]
    if isinstance(payload, tuple):
        return tuple([_flat_payload(part) for part in payload])
    return {key: _flat_payload(part) for key, part in payload.items()}


def _payload(flat: Any) -> Any:
    if isinstance(flat, list):
        dtype, shape, data = flat
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if isinstance(flat, tuple):
        return tuple([_payload(part) for part in flat])
    if isinstance(flat, dict):
        return {key: _payload(part) for key, part in flat.items()}
    return flat
