"""Any field as plain buffers: tensors (tensors.py), numeric arrays, and arrays of objects."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from quadriga.protocol.values.encode_tensors import encode_tensors
from quadriga.protocol.values.field_spec import FieldSpec, Payload
from quadriga.protocol.values.nested import EncodedTensor, decode_tensor


def encode(value: Any, key: str) -> tuple[FieldSpec, Payload, int]:
    """`(spec, payload, payload bytes)` of one field. Payloads of CPU tensors and of numeric arrays
    share memory with `value` where its layout allows. Raises `FieldError` as `encode_tensors`.
    """
    if not isinstance(value, np.ndarray):
        return encode_tensors(value, key)
    if value.dtype == object:
        return _freeze_objects(value)
    data = np.ascontiguousarray(value).reshape(value.shape)
    return FieldSpec("array", data.dtype.str, data.shape[1:]), data, int(data.nbytes)


def _freeze_objects(value: np.ndarray[Any, Any]) -> tuple[FieldSpec, Payload, int]:
    file = io.BytesIO()
    pickler = _RowPickler(file, protocol=5)
    ends = np.zeros(len(value) + 1, dtype=np.int64)
    try:
        for i, row in enumerate(value):
            pickler.clear_memo()
            pickler.dump(row)
            ends[i + 1] = file.tell()
    except (_NeedsByValue, pickle.PicklingError, AttributeError, TypeError):
        return FieldSpec("raw", "object", value.shape[1:]), value, int(value.nbytes)
    data = np.frombuffer(file.getbuffer(), dtype=np.uint8)
    spec = FieldSpec("objects", "object", value.shape[1:])
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


class _NeedsByValue(Exception):
    """A row holds something that is defined in the user's script, where workers cannot import."""


class _RowPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return decode_tensor, (EncodedTensor.of(obj, private=False),)
        owner = obj if isinstance(obj, type) or callable(obj) else type(obj)
        if getattr(owner, "__module__", "") == "__main__":
            raise _NeedsByValue
        return NotImplemented
