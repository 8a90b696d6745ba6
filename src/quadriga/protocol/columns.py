"""Columns, the fields of a batch: local values, or references to stored rows.

`encode` turns a value into a payload and `decode` returns a private, writable copy of exactly the
chosen rows: payloads may be read-only shared memory, and a method may write into what it received.
`RemoteColumn` is a field whose rows are stored; it is selected, joined and fetched here.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol.storage import (
    CONTROLLER,
    Array,
    Handle,
    Ints,
    LocalHandle,
    Origin,
    Plan,
    RowMap,
    RowSelection,
    Shard,
    StoredValue,
    concat_maps,
    cut_rows,
    fetch_many,
    importable_spec,
    is_row_handle,
    is_transport_pickling,
    snapshot,
    traffic,
    transports,
)
from quadriga.protocol.tensordicts import NonTensorStack, TensorDict, TensorDictBase
from quadriga.protocol.values import (
    CARRIER_OF_SIZE,
    NUMPY_KNOWS,
    POOLED_BYTES,
    FieldSpec,
    Kind,
    LocalValue,
    ObjectArray,
    Payload,
    RaggedPayload,
    build_jagged,
    clone_value,
    concat_values,
    dtype_name,
    jagged_parts,
    nbytes_of,
    objects_of,
    pooled_empty,
    ragged_dim,
    same_values,
    stack_of_objects,
    take_value,
)

# Segments are copied one by one while they are few or long. Permuted batches have many short ones,
# which are gathered by one indexing call per shard.
_LOOP_SEGMENTS = 64
_LOOP_BYTES = 4096


def decode(spec: FieldSpec, rows: RowMap, payloads: Sequence[Payload]) -> tuple[LocalValue, int]:
    """Return the value of `rows` (one payload for each shard) and the bytes copied for it."""
    return _DECODERS[spec.kind](spec, rows, payloads)


def _tensor(spec: FieldSpec, rows: RowMap, payloads: Sequence[Array]) -> tuple[Tensor, int]:
    tensor, carrier = _empty(spec.dtype, (len(rows), *spec.tail))
    _copy_rows(carrier, rows, payloads)
    return _to_device(tensor, spec.device), _read_bytes(spec, rows, payloads)


def _read_bytes(spec: FieldSpec, rows: RowMap, payloads: Sequence[Array]) -> int:
    """Return the bytes of these rows in their payloads, whose items can have different sizes."""
    sizes: Ints = np.array([payload.itemsize for payload in payloads], dtype=np.int64)
    shards, starts, stops = rows.segments.T
    return int(((stops - starts) * sizes[shards]).sum()) * math.prod(spec.tail)


def _empty(dtype: str, shape: tuple[int, ...]) -> tuple[Tensor, Array]:
    """Return a new tensor, and the numpy array through which its bytes are written."""
    wanted: torch.dtype = getattr(torch, dtype)
    known = wanted in NUMPY_KNOWS
    stored = wanted if known else CARRIER_OF_SIZE[wanted.itemsize]
    small = math.prod(shape) * stored.itemsize < POOLED_BYTES
    tensor = (
        torch.empty(shape, dtype=stored, device="cpu") if small else pooled_empty(shape, stored)
    )
    return (tensor if known else tensor.view(wanted)), tensor.numpy()


def current_device(kind: str) -> torch.device:
    """Return the current device of a type ("cuda") in this process, the CPU if there is none."""
    module = getattr(torch, kind, None)
    if kind == "cpu" or module is None or not module.is_available():
        return torch.device("cpu")
    return torch.device(kind, module.current_device())


def _to_device(tensor: Tensor, device: str) -> Tensor:
    return tensor if device == "cpu" else tensor.to(current_device(device))


def _copy_rows(out: Array, rows: RowMap, payloads: Sequence[Array]) -> None:
    """Copy each segment to its place in `out`. Integers are widened to those of `out`."""
    count = len(rows.segments)
    if count == 0 or out.size == 0:
        return
    if count <= _LOOP_SEGMENTS or out.nbytes >= count * _LOOP_BYTES:
        for at, shard, start, stop in _runs(rows):
            np.copyto(out[at : at + stop - start], payloads[shard][start:stop])
        return
    # Segments [[1, 2, 3], [0, 0, 2]]: shard_of 1 0 0, row_of 2 0 1. Shard 0 fills out[[1, 2]] with
    # its rows [0, 1], shard 1 fills out[[0]] with its row [2].
    shard_of, row_of = rows.expand()
    for number, payload in enumerate(payloads):
        mine = np.flatnonzero(shard_of == number)
        if len(mine) == len(shard_of) and payload.dtype == out.dtype:
            # "clip" because the default mode buffers `out`; row_of is always within the payload.
            np.take(payload, row_of, axis=0, out=out, mode="clip")
        else:
            out[mine] = payload[row_of[mine]]


def _runs(rows: RowMap) -> Iterator[tuple[int, int, int, int]]:
    """Yield `(batch row, shard, first row, row after the last)` of each segment."""
    at = 0
    for shard, start, stop in rows.segments.tolist():
        yield at, shard, start, stop
        at += stop - start


def _array(spec: FieldSpec, rows: RowMap, payloads: Sequence[Array]) -> tuple[Array, int]:
    out: Array = np.empty((len(rows), *spec.tail), dtype=spec.dtype)
    _copy_rows(out, rows, payloads)
    return out, out.nbytes


def _jagged(spec: FieldSpec, rows: RowMap, payloads: Sequence[RaggedPayload]) -> tuple[Tensor, int]:
    # Rows of 3 and 1 numbers from shard 1, then a row of 2 from shard 0: ends 0 3 4 6. The values
    # of a segment are consecutive in its shard, so each segment is one copy.
    lengths = [np.diff(payloads[s][1][start : stop + 1]) for _, s, start, stop in _runs(rows)]
    ends: Ints = np.zeros(len(rows) + 1, dtype=np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=ends[1:])
    values, out = _empty(spec.dtype, (int(ends[-1]), *spec.tail))
    for at, shard, start, stop in _runs(rows):
        data, offsets = payloads[shard]
        np.copyto(out[ends[at] : ends[at + stop - start]], data[offsets[start] : offsets[stop]])
    offsets_tensor = _to_device(torch.from_numpy(ends), spec.device)
    nested = build_jagged(_to_device(values, spec.device), offsets_tensor, spec.ragged_dim)
    return nested, values.numel() * values.element_size() + ends.nbytes


def _objects(
    spec: FieldSpec, rows: RowMap, payloads: Sequence[RaggedPayload]
) -> tuple[ObjectArray, int]:
    out = np.empty((len(rows), *spec.tail), dtype=object)
    nbytes = out.shape[0] * 8 + 8
    for at, shard, start, stop in _runs(rows):
        data, offsets = payloads[shard]
        # Slices of a memoryview are not copied before they are unpickled.
        view, ends = data.data, offsets[start : stop + 1].tolist()
        for i in range(stop - start):
            out[at + i] = pickle.loads(view[ends[i] : ends[i + 1]])
        nbytes += ends[-1] - ends[0]
    return out, nbytes


def _raw(spec: FieldSpec, rows: RowMap, payloads: Sequence[ObjectArray]) -> tuple[ObjectArray, int]:
    out = np.empty((len(rows), *spec.tail), dtype=object)
    for at, shard, start, stop in _runs(rows):
        out[at : at + stop - start] = copy.deepcopy(payloads[shard][start:stop])
    return out, out.nbytes


def _tree(
    spec: FieldSpec, rows: RowMap, payloads: Sequence[Mapping[str, Payload]]
) -> tuple[TensorDict, int]:
    fields: dict[str, object] = {}
    total = 0
    for key, child in spec.children:
        value, nbytes = decode(child, rows, [payload[key] for payload in payloads])
        total += nbytes
        stacked = child.kind in ("objects", "raw") and isinstance(value, np.ndarray)
        fields[key] = stack_of_objects(value) if stacked else value  # type: ignore[arg-type]  # an array
    return TensorDict(fields, batch_size=[len(rows), *spec.tail]), total


# The kind of the spec says which payloads each decoder receives.
_DECODERS: dict[Kind, Callable[[FieldSpec, RowMap, Sequence[Any]], tuple[LocalValue, int]]] = {
    "tensor": _tensor,
    "jagged": _jagged,
    "array": _array,
    "objects": _objects,
    "raw": _raw,
    "tree": _tree,
}


@dataclass(slots=True)
class EncodedTensor:
    """An encoded tensor outside a batch: dense with any number of dimensions, jagged, or a
    `TensorDict`. `rows`: length of dimension 0; a dense tensor is encoded as one row."""

    spec: FieldSpec
    payload: Payload
    rows: int

    def decode(self) -> LocalValue:
        """Return the tensor, private to the caller."""
        rows = RowMap.of_shard(Shard(0, self.rows, CONTROLLER))
        value, _ = decode(self.spec, rows, [self.payload][: len(rows.shards)])
        return value.squeeze(0) if self.spec.kind == "tensor" else value


@dataclass(slots=True)
class CopiedObject:
    """A copy of an object that is sent within one process. Each receiver gets its own copy."""

    value: StoredValue

    def decode(self) -> StoredValue:
        """Return a copy for one receiver."""
        return snapshot(self.value)


def decode_leaf(value: StoredValue) -> StoredValue:
    """Decode a value outside a batch: tensors; arrays as private, writable copies."""
    if isinstance(value, EncodedTensor | CopiedObject):
        return value.decode()
    return snapshot(value) if isinstance(value, np.ndarray) else value


Encoded = tuple[FieldSpec, Payload, int]
"""The description of a field, its payload, and the bytes of the payload."""

NARROWED_BYTES = 1024
"""Below this, looking at the numbers costs more than sending them."""

_SAMPLE = 1024


def encode(value: object, key: str, *, narrow: bool = False) -> Encoded:
    """Encode one field.

    `narrow`: the payload is sent to another process, so int64 takes fewer bytes where it can.

    Payloads of CPU tensors and of numeric arrays share memory with `value` where its layout allows.
    Tensors are detached; those on CUDA are copied to host memory. Raises `FieldError` naming `key`
    for sparse and quantized tensors and for anything that is not a field.
    """
    if isinstance(value, np.ndarray):
        return _encode_array(value, key)
    if isinstance(value, Tensor):
        if value.is_nested:
            return _encode_jagged(value, key)
        encoded = _encode_dense(value, key)
        return _narrow(encoded) if narrow else encoded
    if isinstance(value, TensorDictBase):
        return _encode_tree(value, key)
    raise FieldError(
        f"field '{key}': expected a tensor, an array or a TensorDict of tensors, "
        f"got {type(value).__name__}",
        field=key,
    )


def _encode_array(value: Array, key: str) -> Encoded:
    # Subclasses have more than their items (a mask, attributes), which would be lost. A memmap has
    # not: it is an array whose memory is a file.
    if type(value) not in (np.ndarray, np.memmap):
        raise FieldError(
            f"field '{key}' is a {type(value).__name__}; only plain numpy arrays can be sent. "
            "Convert it first (np.asarray), and send a mask as a field of its own",
            field=key,
        )
    if value.dtype == object:
        return _encode_objects(value, key)
    dtype = value.dtype
    # Variable-length strings and dtypes of other libraries have items that are not plain bytes.
    if dtype.hasobject or dtype.names is not None or np.dtype(dtype.str) != dtype:
        raise FieldError(
            f"field '{key}' is an array of dtype {dtype!r}, whose items cannot be sent as bytes. "
            "Convert it first: to dtype object (astype(object)), or to a dtype of numpy",
            field=key,
        )
    data = np.ascontiguousarray(value).reshape(value.shape)
    return FieldSpec("array", dtype.str, data.shape[1:]), data, int(data.nbytes)


def _encode_dense(value: Tensor, key: str) -> Encoded:
    if value.layout != torch.strided or value.is_quantized:
        raise FieldError(
            f"field '{key}' is a tensor of layout {value.layout}; only dense and jagged tensors "
            "can be sent. Convert it first (to_dense)",
            field=key,
        )
    data = host_array(value)
    dtype = dtype_name(value.dtype)
    return FieldSpec("tensor", dtype, data.shape[1:], value.device.type), data, int(data.nbytes)


def _narrow(encoded: Encoded) -> Encoded:
    """Return an int64 tensor above `NARROWED_BYTES` in the smallest signed integers that hold it.

    The description keeps int64, and `decode` widens each payload: the receiver gets what was sent.
    A mask takes 1 byte for each token instead of 8, token ids take 2 or 4.
    """
    spec, payload, nbytes = encoded
    if nbytes <= NARROWED_BYTES or spec.dtype != "int64" or not isinstance(payload, np.ndarray):
        return encoded
    # Hashes and times need all bytes: a few numbers show that.
    if _smallest(payload.reshape(-1)[:_SAMPLE]) is None:
        return encoded
    if (dtype := _smallest(payload)) is None:
        return encoded
    narrowed = payload.astype(dtype)
    return spec, narrowed, int(narrowed.nbytes)


def _smallest(numbers: Array) -> np.dtype[np.generic] | None:
    """Return the smallest signed dtype below int64 that holds all numbers, None if none does."""
    low, high = int(numbers.min()), int(numbers.max())
    for dtype in (np.int8, np.int16, np.int32):
        limits = np.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return np.dtype(dtype)
    return None


def host_array(value: Tensor) -> Array:
    """Return a contiguous numpy array with the bytes of a dense tensor; a view where possible."""
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.resolve_conj().resolve_neg()
    if value.dtype not in NUMPY_KNOWS:
        # bfloat16 has 2 bytes per item: its bytes are viewed as int16, and viewed back on arrival.
        value = value.view(CARRIER_OF_SIZE[value.element_size()])
    return cast(Array, value.contiguous().numpy())


def _encode_jagged(value: Tensor, key: str) -> Encoded:
    try:
        values, offsets = jagged_parts(value)
    except FieldError as error:
        raise FieldError(f"field '{key}': {error}", field=key) from None
    data, ends = host_array(values), host_array(offsets).astype(np.int64)
    dtype = dtype_name(values.dtype)
    device, dim = values.device.type, ragged_dim(value)
    spec = FieldSpec("jagged", dtype, data.shape[1:], device, ragged_dim=dim)
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


def _encode_tree(value: TensorDictBase, key: str) -> Encoded:
    encoded: dict[str, Encoded] = {}
    for name, entry in value.items():
        rows = objects_of(entry) if isinstance(entry, NonTensorStack) else entry
        encoded[str(name)] = encode(rows, f"{key}.{name}")
    spec = FieldSpec(
        "tree",
        tail=tuple(value.batch_size[1:]),
        children=tuple((k, child) for k, (child, _, _) in encoded.items()),
    )
    payload = {k: child for k, (_, child, _) in encoded.items()}
    return spec, payload, sum(size for _, _, size in encoded.values())


def _encode_objects(value: Array, key: str) -> Encoded:
    """Pickle each row by itself, so that a part of the batch is decoded from its own rows only.

    Raises `FieldError` if the code of a class raises when its object is pickled.
    """
    file = io.BytesIO()
    pickler = _RowPickler(file, protocol=5)
    ends = np.zeros(len(value) + 1, dtype=np.int64)
    try:
        for i, row in enumerate(value):
            # Without this, a row would refer to objects of earlier rows and could not be decoded
            # without them.
            pickler.clear_memo()
            pickler.dump(row)
            ends[i + 1] = file.tell()
    except (_NeedsTransport, pickle.PicklingError, AttributeError, TypeError):
        return FieldSpec("raw", "object", value.shape[1:]), value, int(value.nbytes)
    except Exception as error:  # anything that the user's classes may raise
        raise FieldError(
            f"field '{key}': a row cannot be pickled: {type(error).__name__}: {error}. Replace it "
            "by data that can be pickled, or let the worker build the object itself",
            field=key,
        ) from error
    data = np.frombuffer(file.getbuffer(), dtype=np.uint8)
    spec = FieldSpec("objects", "object", value.shape[1:])
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


TensorReduction = tuple[Callable[[EncodedTensor], LocalValue], tuple[EncodedTensor]]
"""How a tensor inside a pickled object is written: a function and its argument."""


class _NeedsTransport(Exception):
    """A row contains an object that only the pickler of the transport can encode."""


@cache
def _is_importable(module: str) -> bool:
    """Return whether another process can import a module by its name, from the same file.

    It cannot import the user's script, nor a file that was loaded by its path: such a module is in
    `sys.modules` only. The pickler of the transport sends the code of their classes.
    """
    spec = importable_spec(module)
    if spec is None or module == "__main__":
        return False
    # A file that was loaded under the name of another module: the name leads to the other one.
    file = getattr(sys.modules.get(module), "__file__", None)
    return not spec.has_location or file is None or file == spec.origin


class _RowPickler(pickle.Pickler):
    """Encodes tensors inside rows as fields are encoded, without torch's own pickle format."""

    def reducer_override(self, obj: object) -> TensorReduction:
        if isinstance(obj, Tensor):
            return EncodedTensor.decode, (encode_tensor(obj, private=False),)
        if any(isinstance(obj, transport.types) for transport in transports):
            raise _NeedsTransport
        owner = obj if isinstance(obj, type) or callable(obj) else type(obj)
        if not _is_importable(getattr(owner, "__module__", None) or "builtins"):
            raise _NeedsTransport
        return NotImplemented  # type: ignore[no-any-return]


def encode_tensor(tensor: Tensor | TensorDictBase, private: bool) -> EncodedTensor:
    """Encode a tensor or a `TensorDict` outside a batch.

    `private`: copy the payload, for a transport that does not copy it.
    """
    if isinstance(tensor, Tensor) and not tensor.is_nested:
        rows, (spec, payload, _) = 1, encode(tensor.detach().unsqueeze(0), "argument")
    else:
        rows, (spec, payload, _) = int(tensor.shape[0]), encode(tensor, "argument")
    return EncodedTensor(spec, snapshot(payload) if private else payload, rows)


def encode_leaf(value: StoredValue, private: bool = False) -> StoredValue:
    """Encode a value outside a batch.

    Tensors become an `EncodedTensor`. With `private`, for a transport that does not copy, any other
    object becomes a `CopiedObject`, unless it is immutable or cannot be copied.
    """
    if isinstance(value, Tensor) or (isinstance(value, TensorDictBase) and value.batch_dims):
        return encode_tensor(value, private)
    if not private:
        return value
    try:
        copied = snapshot(value)
    except Exception:  # a lock, an open file: sender and receiver share the object
        return value
    return value if copied is value else CopiedObject(copied)


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
    row_map = RowMap.of_shard(Shard.new(int(value.shape[0]), origin))
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
