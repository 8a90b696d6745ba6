"""`Message`: one batch as it is sent, and its pickled form.

A message holds its fields as handles: small fields in a `LocalHandle`, with their bytes, large ones
in a handle of a store. A `Packer` (`boundary.py`) makes the messages of a call, `message_of`
that of a batch that is pickled outside a call. `unpack` returns the contents of a message, private
to the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from quadriga.protocol import columns, contents as halves
from quadriga.protocol.contents import Contents, MetaInfo
from quadriga.protocol.storage import PLAIN_TYPES, Handle, LocalHandle, row_map_of, traffic, walk
from quadriga.protocol.values import FieldSpec, flat_payload, payload_of

INLINE_BYTES = 64 * 1024
"""A field of a shard up to this size is sent in the message; a larger one is put into the store."""

Flat: TypeAlias = tuple[Any, ...]
"""Nested tuples, strings, numbers, bytes, handles and large arrays: pickled without Python code."""
FlatHandle: TypeAlias = Callable[[Handle], object]
HandleOf: TypeAlias = Callable[[Any], Handle]


def _itself(handle: Handle) -> Handle:
    return handle


def _flat_of(handle: Handle, flat_handle: FlatHandle) -> object:
    if type(handle) is LocalHandle:
        return [flat_payload(handle.value), handle.nbytes]
    return flat_handle(handle)


def _handle_of(flat: Any, handle_of: HandleOf) -> Handle:
    return LocalHandle(payload_of(flat[0]), flat[1]) if type(flat) is list else handle_of(flat)


@dataclass(slots=True)
class Message:
    """One batch as it is sent.

    `kind`: the class of the batch, None for `DataProto` itself; `attributes`: what an instance has
    besides the three parts of a batch; `head`: batch size and device type of its tensor half, None
    if it has none.
    """

    kind: type[object] | None
    head: tuple[tuple[int, ...], str | None] | None
    tensors: dict[str, columns.RemoteColumn]
    arrays: dict[str, columns.RemoteColumn]
    meta: MetaInfo
    attributes: MetaInfo

    def data_bytes(self, handles: frozenset[type] = frozenset()) -> int | None:
        """Return the bytes of the small fields; None for a message with objects or classes of the
        user, or with handles of a store of other classes than these."""
        if self.kind is not None or self.attributes:
            return None
        total = 0
        for column in (*self.tensors.values(), *self.arrays.values()):
            if has_raw_rows(column.spec):
                return None
            for handle in column.handles:
                if type(handle) is LocalHandle:
                    total += handle.nbytes
                elif type(handle) not in handles:
                    return None
        plain = all(type(value) in PLAIN_TYPES for value in self.meta.values())
        return total if plain else None

    def flat(self, flat_handle: FlatHandle = _itself) -> Flat:
        """Return the arguments of `restore`, see the drawing below.

        `flat_handle` returns the flat form of a handle of a store, which is no list.
        """
        halves: list[Flat] = []
        maps: dict[int, tuple[int, Flat]] = {}
        for half in (self.tensors, self.arrays):
            flat: list[Flat] = []
            for key, column in half.items():
                name = id(column.row_map)
                if name not in maps:
                    maps[name] = len(maps), column.row_map.flat()
                handles = tuple([_flat_of(handle, flat_handle) for handle in column.handles])
                flat.append((key, _flat_spec(column.spec), maps[name][0], handles))
            halves.append(tuple(flat))
        row_maps = tuple([flat_map for _, flat_map in maps.values()])
        return self.kind, self.head, row_maps, *halves, self.meta, self.attributes

    def __reduce__(self) -> tuple[Callable[..., Message], Flat]:
        return restore, self.flat()


def has_raw_rows(spec: FieldSpec) -> bool:
    """Return whether a field, or a field of a nested TensorDict in it, is of kind "raw"."""
    return spec.kind == "raw" or any(has_raw_rows(child) for _, child in spec.children)


def message_of(
    contents: Contents,
    kind: type[object] | None,
    attributes: MetaInfo,
    packed: Callable[[str, columns.Column], columns.RemoteColumn],
    private: bool = False,
) -> Message:
    """Return the message of a batch. `packed` makes the column of each field.

    `private`: whether tensors in the meta information are copied.
    """
    batch, arrays, meta = contents
    head = None
    if batch is not None:
        head = tuple(batch.batch_size), None if batch.device is None else batch.device.type
    leaf = partial(columns.encode_leaf, private=private)
    return Message(
        kind,
        head,
        {key: packed(key, column) for key, column in halves.tensor_columns(batch).items()},
        {key: packed(key, column) for key, column in halves.array_columns(arrays).items()},
        walk(meta, leaf),
        walk(attributes, leaf),
    )


def unpack(message: Message) -> tuple[Contents, MetaInfo]:
    """Return the contents and the attributes of the batch of a message.

    Small fields in the message become local values; all others are fetched when they are read.
    """
    batch = None
    if message.head is not None:
        size, device = message.head
        tensors = {key: _received(column) for key, column in message.tensors.items()}
        batch = halves.tensor_half(
            tensors, size, None if device is None else columns.current_device(device)
        )
    arrays = halves.make_arrays({key: _received(c) for key, c in message.arrays.items()})
    contents = Contents(batch, arrays, walk(message.meta, columns.decode_leaf))
    return contents, walk(message.attributes, columns.decode_leaf)


def _received(column: columns.RemoteColumn) -> columns.Column:
    # A larger field of a pickled batch is decoded when it is read, so a batch that is only partly
    # read is not copied as a whole.
    nbytes = sum([handle.nbytes for handle in column.handles])
    if nbytes > INLINE_BYTES or not column.has_local_payloads():
        return column.unread()
    payloads = [handle.fetch() for handle in column.handles]
    value, nbytes = columns.decode(column.spec, column.row_map, payloads)
    traffic.add(fetched_bytes=nbytes, fetched_fields=1)
    return value


# A pickler of a transport may call Python for every object that is not of a built-in type, so a
# message is pickled as tuples, strings and bytes. Only handles of a store and large payloads stay
# objects. A batch of 3 rows with a field x that actor rank 0 stored, and a small local field y:
#
#     kind, head   None, ((3,), None)                     a DataProto; batch size and device
#     row_maps     0: ((17, 3, "actor", 0, "make", "10.0.0.1"),)   shards (uid, rows, writer)
#                     b"..."                              segments [[0, 0, 3]] as bytes
#                  1: ((42, 3, "controller", 0, "", ""),), b"..."
#     tensors      ("x", spec, 0, [handle])               row map 0
#                  ("y", spec, 1, [[["<i8", (3,), b"..."], 24]])      payload and its bytes
#
# Each row map is written once, however many fields share it.


def restore(
    kind: type[object] | None,
    head: tuple[tuple[int, ...], str | None] | None,
    row_maps: Iterable[Flat],
    tensors: Iterable[Flat],
    arrays: Iterable[Flat],
    meta: MetaInfo,
    attributes: MetaInfo,
    handle_of: HandleOf = _itself,
) -> Message:
    """Return the message of a flat form. `handle_of` is the inverse of `flat_handle`."""
    known = [row_map_of(*parts) for parts in row_maps]
    fields: list[dict[str, columns.RemoteColumn]] = []
    for half in (tensors, arrays):
        fields.append({})
        for key, spec, number, flat in half:
            handles = tuple([_handle_of(handle, handle_of) for handle in flat])
            fields[-1][key] = columns.RemoteColumn(_spec(spec), known[number], handles)
    return Message(kind, head, fields[0], fields[1], meta, attributes)


def _flat_spec(spec: FieldSpec) -> Flat:
    children = tuple([(key, _flat_spec(child)) for key, child in spec.children])
    return *spec[:4], children, spec.ragged_dim


def _spec(flat: Flat) -> FieldSpec:
    spec = FieldSpec(*flat)
    if spec.children:
        spec = spec._replace(children=tuple([(key, _spec(c)) for key, c in spec.children]))
    return spec
