"""Encode values as payloads: numpy arrays that share memory with the value where possible."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.values import jagged, operations
from quadriga.protocol.values.decode import CopiedObject, EncodedTensor, decode_tensor, dtype_of
from quadriga.protocol.values.field_spec import (
    CARRIER_OF_SIZE,
    NUMPY_KNOWS,
    Array,
    FieldSpec,
    LocalValue,
    Payload,
)
from quadriga.protocol.values.storage import StoredValue, snapshot, transports

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
    name = dtype_text(value.dtype, key)
    data = np.ascontiguousarray(value).reshape(value.shape)
    # Structured items are sent as raw bytes, so that no step depends on their fields.
    payload = data if data.dtype.names is None else data.view(f"V{data.dtype.itemsize}")
    return FieldSpec("array", name, data.shape[1:]), payload, int(data.nbytes)


def dtype_text(dtype: np.dtype[np.generic], key: str) -> str:
    """Return a numpy dtype as text that `decode.dtype_of` reads.

    Raises `FieldError` for a dtype whose items are not plain bytes: variable-length strings,
    structures that contain objects, dtypes of other libraries.
    """
    text = dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))
    if dtype.hasobject or dtype_of(text) != dtype:
        raise FieldError(
            f"field '{key}' is an array of dtype {dtype!r}, whose items cannot be sent as bytes. "
            "Convert it first: to dtype object (astype(object)), or to a dtype of numpy",
            field=key,
        )
    return text


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
        values, offsets = jagged.parts(value)
    except FieldError as error:
        raise FieldError(f"field '{key}': {error}", field=key) from None
    data, ends = host_array(values), host_array(offsets).astype(np.int64)
    dtype = operations.dtype_name(values.dtype)
    device, dim = values.device.type, jagged.ragged_dim(value)
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
        return _encode_objects(operations.object_array(value.tolist()), key)
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
