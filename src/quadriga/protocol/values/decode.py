"""Decode payloads: a private, writable copy of exactly the chosen rows.

Payloads may be read-only shared memory. A decoded value shares no memory with them, so a method may
write into what it received.
"""

from __future__ import annotations

import ast
import copy
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from quadriga.protocol.values import buffer_pool, jagged
from quadriga.protocol.values.field_spec import (
    CARRIER_OF_SIZE,
    NUMPY_KNOWS,
    Array,
    FieldSpec,
    Ints,
    Kind,
    LocalValue,
    ObjectArray,
    Payload,
    RaggedPayload,
)
from quadriga.protocol.values.rows import RowMap, Shard
from quadriga.protocol.values.storage import CONTROLLER, StoredValue, snapshot

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
    if math.prod(shape) * stored.itemsize < buffer_pool.POOLED_BYTES:
        tensor = torch.empty(shape, dtype=stored, device="cpu")
    else:
        tensor = buffer_pool.empty(shape, stored)
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
    out: Array = np.empty((len(rows), *spec.tail), dtype=dtype_of(spec.dtype))
    structured = out.dtype.names is not None
    _copy_rows(out.view(f"V{out.dtype.itemsize}") if structured else out, rows, payloads)
    return out, out.nbytes


def dtype_of(text: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of `encode.dtype_text`: "<f4", or the fields of a structure."""
    if text.startswith("["):
        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return np.dtype(text)


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
    nested = jagged.build(_to_device(values, spec.device), offsets_tensor, spec.ragged_dim)
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
