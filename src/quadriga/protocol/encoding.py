"""Decode payloads: a private, writable copy of exactly the chosen rows.

Payloads may be read-only shared memory. A decoded value shares no memory with them, so a method may
write into what it received.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.storage import (
    CONTROLLER,
    Array,
    Ints,
    RowMap,
    Shard,
    StoredValue,
    snapshot,
    transports,
)
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
    dtype_name,
    jagged_parts,
    object_array,
    pooled_empty,
    ragged_dim,
    row_count,
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
    if math.prod(shape) * stored.itemsize < POOLED_BYTES:
        tensor = torch.empty(shape, dtype=stored, device="cpu")
    else:
        tensor = pooled_empty(shape, stored)
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
        # Objects are entries of a TensorDict only as a stack of non-tensors.
        stacked = child.kind in ("objects", "raw") and isinstance(value, np.ndarray)
        fields[key] = NonTensorStack(*map(NonTensorData, value)) if stacked else value
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


class EncodedTensor:
    """An encoded tensor outside a batch: dense with any number of dimensions, jagged, or a
    `TensorDict`. `rows`: length of dimension 0; a dense tensor is encoded as one row."""

    __slots__ = ("payload", "rows", "spec")

    def __init__(self, spec: FieldSpec, payload: Payload, rows: int) -> None:
        self.spec, self.payload, self.rows = spec, payload, rows

    def decode(self) -> LocalValue:
        """Return the tensor, private to the caller."""
        rows = RowMap.of_shard(Shard(0, self.rows, CONTROLLER))
        value, _ = decode(self.spec, rows, [self.payload][: len(rows.shards)])
        return value.squeeze(0) if self.spec.kind == "tensor" else value

    def __reduce__(self) -> tuple[object, ...]:
        return EncodedTensor, (self.spec, self.payload, self.rows)


class CopiedObject:
    """A copy of an object that is sent within one process. Each receiver gets its own copy."""

    __slots__ = ("value",)

    def __init__(self, value: StoredValue) -> None:
        self.value = value

    def decode(self) -> StoredValue:
        """Return a copy for one receiver."""
        return snapshot(self.value)


def decode_tensor(encoded: EncodedTensor) -> LocalValue:
    """Return the tensor. Tensors inside pickled objects are written as calls of this function."""
    return encoded.decode()


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
    dtype = _smallest(payload)
    if dtype is None:
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
    array: Array = value.contiguous().numpy()
    return array


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
    encoded = {str(k): _encode_entry(v, f"{key}.{k}") for k, v in value.items()}
    spec = FieldSpec(
        "tree",
        tail=tuple(value.batch_size[1:]),
        children=tuple((k, child) for k, (child, _, _) in encoded.items()),
    )
    payload = {k: child for k, (_, child, _) in encoded.items()}
    return spec, payload, sum(size for _, _, size in encoded.values())


def _encode_entry(value: object, key: str) -> Encoded:
    """Encode one entry of a `TensorDict`; a `NonTensorStack` as the object array of its rows."""
    if isinstance(value, NonTensorStack):
        return _encode_objects(object_array(value.tolist()), key)
    return encode(value, key)


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
    package = module.rpartition(".")[0]
    path = getattr(sys.modules.get(package), "__path__", None)
    if module == "__main__" or (package and path is None):
        return False
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    specs = (find(module, path) for find in finders if find is not None)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return False
    # A file that was loaded under the name of another module: the name leads to the other one.
    file = getattr(sys.modules.get(module), "__file__", None)
    return not spec.has_location or file is None or file == spec.origin


class _RowPickler(pickle.Pickler):
    """Encodes tensors inside rows as fields are encoded, without torch's own pickle format."""

    def reducer_override(self, obj: object) -> TensorReduction:
        if isinstance(obj, Tensor):
            return decode_tensor, (encode_tensor(obj, private=False),)
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
        rows, (spec, payload, _) = row_count(tensor), encode(tensor, "argument")
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
