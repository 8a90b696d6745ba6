"""Encode values as payloads: numpy arrays that share memory with the value where possible."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.values import jagged, operations
from quadriga.protocol.values.decode import CopiedObject, EncodedTensor, decode_tensor
from quadriga.protocol.values.field_spec import (
    CARRIER_OF_SIZE,
    NUMPY_KNOWS,
    Array,
    FieldSpec,
    LocalValue,
    ObjectArray,
    Payload,
)
from quadriga.protocol.values.storage import StoredValue, snapshot

Encoded = tuple[FieldSpec, Payload, int]
"""The description of a field, its payload, and the bytes of the payload."""


def encode(value: object, key: str) -> Encoded:
    """Encode one field.

    Payloads of CPU tensors and of numeric arrays share memory with `value` where its layout allows.
    Tensors are detached; those on CUDA are copied to host memory. Raises `FieldError` naming `key`
    for sparse and quantized tensors and for anything that is not a field.
    """
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return _encode_objects(value)
        data = np.ascontiguousarray(value).reshape(value.shape)
        return FieldSpec("array", data.dtype.str, data.shape[1:]), data, int(data.nbytes)
    if isinstance(value, Tensor):
        return _encode_jagged(value, key) if value.is_nested else _encode_dense(value, key)
    if isinstance(value, TensorDictBase):
        return _encode_tree(value, key)
    raise FieldError(
        f"field '{key}': expected a tensor, an array or a TensorDict of tensors, "
        f"got {type(value).__name__}",
        field=key,
    )


def _encode_dense(value: Tensor, key: str) -> Encoded:
    if value.layout != torch.strided or value.is_quantized:
        raise FieldError(
            f"field '{key}' is a tensor of layout {value.layout}; only dense and jagged tensors "
            "can be sent. Convert it first (to_dense)",
            field=key,
        )
    data = host_array(value)
    dtype = operations.dtype_name(value.dtype)
    return FieldSpec("tensor", dtype, data.shape[1:], value.device.type), data, int(data.nbytes)


def host_array(value: Tensor) -> Array:
    """Return a contiguous numpy array with the bytes of a dense tensor; a view where possible."""
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.resolve_conj().resolve_neg().contiguous()
    if value.dtype not in NUMPY_KNOWS:
        # bfloat16 has 2 bytes per item: its bytes are viewed as int16, and viewed back on arrival.
        value = value.view(CARRIER_OF_SIZE[value.element_size()])
    array: Array = value.numpy()
    return array


def _encode_jagged(value: Tensor, key: str) -> Encoded:
    try:
        values, offsets = jagged.parts(value)
    except FieldError as error:
        raise FieldError(f"field '{key}': {error}", field=key) from None
    data, ends = host_array(values), host_array(offsets).astype(np.int64)
    dtype = operations.dtype_name(values.dtype)
    spec = FieldSpec("jagged", dtype, data.shape[1:], values.device.type)
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


def _encode_tree(value: TensorDictBase, key: str) -> Encoded:
    encoded = {str(k): encode(v, f"{key}.{k}") for k, v in value.items()}
    spec = FieldSpec(
        "tree",
        tail=tuple(value.batch_size[1:]),
        children=tuple((k, child) for k, (child, _, _) in encoded.items()),
    )
    payload = {k: child for k, (_, child, _) in encoded.items()}
    return spec, payload, sum(size for _, _, size in encoded.values())


def _encode_objects(value: ObjectArray) -> Encoded:
    """Pickle each row by itself, so that a part of the batch is decoded from its own rows only."""
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
    except (_NeedsByValue, pickle.PicklingError, AttributeError, TypeError):
        return FieldSpec("raw", "object", value.shape[1:]), value, int(value.nbytes)
    data = np.frombuffer(file.getbuffer(), dtype=np.uint8)
    spec = FieldSpec("objects", "object", value.shape[1:])
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


TensorReduction = tuple[Callable[[EncodedTensor], LocalValue], tuple[EncodedTensor]]
"""How a tensor inside a pickled object is written: a function and its argument."""


class _NeedsByValue(Exception):
    """A row contains something defined in the user's script, which workers cannot import."""


class _RowPickler(pickle.Pickler):
    """Encodes tensors inside rows as fields are encoded, without torch's own pickle format."""

    def reducer_override(self, obj: object) -> TensorReduction:
        if isinstance(obj, Tensor):
            return decode_tensor, (encode_tensor(obj, private=False),)
        owner = obj if isinstance(obj, type) or callable(obj) else type(obj)
        if getattr(owner, "__module__", "") == "__main__":
            raise _NeedsByValue
        return NotImplemented  # type: ignore[no-any-return]


def encode_tensor(tensor: Tensor | TensorDictBase, private: bool) -> EncodedTensor:
    """Encode a tensor or a `TensorDict` outside a batch.

    `private`: copy the payload, for a transport that does not copy it.
    """
    if isinstance(tensor, Tensor) and not tensor.is_nested:
        rows, (spec, payload, _) = 1, encode(tensor.detach().unsqueeze(0), "argument")
    else:
        rows, (spec, payload, _) = operations.row_count(tensor), encode(tensor, "argument")
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
