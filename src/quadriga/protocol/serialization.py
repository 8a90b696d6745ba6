"""Fields as plain buffers, and back.

`freeze` turns one field into a `FieldSpec` and a payload of numpy arrays, which pickle protocol 5
carries out of band: no byte is copied on the way into shared memory but once, and none to look at
it there. `thaw` (thaw.py) builds a private value from the chosen rows of one or more payloads.
Payloads by kind:

    tensor    ndarray [N, ...]; what numpy lacks (bfloat16, float8 …) as integers of its size
    jagged    (values ndarray [total, ...], offsets [N+1] int64)
    array     ndarray [N, ...] that holds no objects
    objects   (bytes uint8 [total], offsets [N+1] int64): each row pickled by itself
    raw       object ndarray: rows that only the transport's own pickler can handle
    tree      {key: payload}: a nested TensorDict
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.errors import FieldError
from quadriga.protocol import jagged

Payload = Any
CARRIER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMPY_KNOWS = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What is known of a field without its bytes.

    `tail`: shape without the batch dimension (of jagged fields: shape of `values` without its
    first). `dtype`: torch's or numpy's name. `device`: where the tensor was made ("cpu", "cuda").
    `children`: fields of a nested TensorDict.
    """

    kind: str
    dtype: str = ""
    tail: tuple[int, ...] = ()
    device: str = "cpu"
    children: tuple[tuple[str, FieldSpec], ...] = ()

    def flat(self) -> tuple[Any, ...]:
        """All of it as built-in values."""
        children = tuple([(key, child.flat()) for key, child in self.children])
        return self.kind, self.dtype, tuple(self.tail), self.device, children

    @staticmethod
    def of(flat: tuple[Any, ...]) -> FieldSpec:
        """The spec of `flat`."""
        kind, dtype, tail, device, children = flat
        nested = tuple([(key, FieldSpec.of(child)) for key, child in children])
        return FieldSpec(kind, dtype, tail, device, nested)

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldSpec, (self.kind, self.dtype, self.tail, self.device, self.children)

    def describe(self, length: int) -> tuple[str, str]:
        """Shape and dtype as text."""
        if self.kind == "jagged":
            return str([length, "*", *self.tail]).replace("'", ""), self.dtype
        return str([length, *self.tail]), self.dtype or self.kind


class _NeedsByValue(Exception):
    """A row holds something that is defined in the user's script, where workers cannot import."""


class _RowPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            from quadriga.protocol.plain import Parcel, open_parcel

            return open_parcel, (Parcel.of(obj, private=False),)
        owner = obj if isinstance(obj, type) or callable(obj) else type(obj)
        if getattr(owner, "__module__", "") == "__main__":
            raise _NeedsByValue
        return NotImplemented


def freeze(value: Any, key: str) -> tuple[FieldSpec, Payload, int]:
    """`(spec, payload, payload bytes)` of one field. Payloads of CPU tensors and of numeric arrays
    share memory with `value` where its layout allows.

    Tensors travel detached, from CUDA through host memory. Raises `FieldError` naming `key` for
    sparse and quantized tensors.
    """
    if isinstance(value, torch.Tensor):
        return _freeze_jagged(value, key) if value.is_nested else _freeze_tensor(value, key)
    if isinstance(value, TensorDictBase):
        return _freeze_tree(value, key)
    if not isinstance(value, np.ndarray):
        raise FieldError(
            f"field '{key}' is a {type(value).__name__}; what travels as a field is a tensor, "
            "an array, or a TensorDict of tensors",
            field=key,
        )
    if value.dtype == object:
        return _freeze_objects(value)
    data = np.ascontiguousarray(value).reshape(value.shape)
    return FieldSpec("array", data.dtype.str, data.shape[1:]), data, int(data.nbytes)


def _freeze_tensor(value: torch.Tensor, key: str) -> tuple[FieldSpec, Payload, int]:
    if value.layout != torch.strided or value.is_quantized:
        raise FieldError(
            f"field '{key}' is a tensor of layout {value.layout}; dense and jagged tensors travel, "
            "so convert it first (to_dense)",
            field=key,
        )
    data = host_array(value)
    spec = FieldSpec("tensor", _name(value.dtype), data.shape[1:], value.device.type)
    return spec, data, int(data.nbytes)


def host_array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """A contiguous numpy array with the bytes of a dense tensor; a view where possible."""
    value = value.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.resolve_conj().resolve_neg().contiguous()
    if value.dtype not in NUMPY_KNOWS:
        value = value.view(CARRIER_OF_SIZE[value.element_size()])
    return value.numpy()


def _freeze_jagged(value: torch.Tensor, key: str) -> tuple[FieldSpec, Payload, int]:
    try:
        values, offsets = jagged.parts(value)
    except FieldError as error:
        raise FieldError(f"field '{key}': {error}", field=key) from None
    data, ends = host_array(values), host_array(offsets).astype(np.int64)
    spec = FieldSpec("jagged", _name(values.dtype), data.shape[1:], values.device.type)
    return spec, (data, ends), int(data.nbytes + ends.nbytes)


def _freeze_tree(value: TensorDictBase, key: str) -> tuple[FieldSpec, Payload, int]:
    frozen = {str(k): freeze(v, f"{key}.{k}") for k, v in value.items()}
    spec = FieldSpec(
        "tree",
        tail=tuple(value.batch_size[1:]),
        children=tuple((k, child) for k, (child, _, _) in frozen.items()),
    )
    payload = {k: child for k, (_, child, _) in frozen.items()}
    return spec, payload, sum(size for _, _, size in frozen.values())


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
