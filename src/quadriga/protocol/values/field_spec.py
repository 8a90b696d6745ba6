"""The description of a field without its bytes, and the types of values and payloads.

A payload is the form in which the bytes of a field are stored and sent. It consists of numpy
arrays, which pickle protocol 5 writes out of band: the bytes are copied once into shared memory and
are read there without a copy. Payloads by kind of field:

    tensor    array [N, ...]; dtypes that numpy lacks (bfloat16, float8) as integers of their size;
              int64 in any signed integers that hold the numbers (`encode`)
    jagged    (values [total, ...], offsets int64 [N + 1])
    tree      {key: payload}: a nested TensorDict
    array     array [N, ...] without objects
    objects   (bytes uint8 [total], offsets int64 [N + 1]): each row is a pickle of its own
    raw       object array: rows that only the pickler of the transport can encode
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

Array: TypeAlias = NDArray[np.generic]
ObjectArray: TypeAlias = NDArray[np.object_]
Ints: TypeAlias = NDArray[np.int64]
LocalValue: TypeAlias = torch.Tensor | TensorDictBase | Array
"""The value of a field in this process. Dimension 0 is the batch."""

RaggedPayload: TypeAlias = tuple[Array, Ints]
Payload: TypeAlias = "Array | RaggedPayload | dict[str, Payload]"
Kind = Literal["tensor", "jagged", "tree", "array", "objects", "raw"]

CARRIER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Item size in bytes → the integer dtype in which numpy stores a dtype that it lacks."""
NUMPY_KNOWS = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
}  # fmt: skip


_SMALL = 2048
"""Arrays up to this many bytes are pickled as bytes: cheaper than an out-of-band buffer."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """The description of a field without its bytes.

    `tail`: shape without the batch dimension; for a jagged field the shape of `values` without
    its ragged dimension, which is dimension `ragged_dim` of the field. `dtype`: name in torch, or
    `encode.dtype_text` of the dtype in numpy. `device`: type of the device on which the tensor was
    created ("cpu", "cuda"). `children`: fields of a nested TensorDict.
    """

    kind: Kind
    dtype: str = ""
    tail: tuple[int, ...] = ()
    device: str = "cpu"
    children: tuple[tuple[str, FieldSpec], ...] = ()
    ragged_dim: int = 1

    def __reduce__(self) -> tuple[type[FieldSpec], tuple[object, ...]]:
        dim = () if self.ragged_dim == 1 else (self.ragged_dim,)
        return FieldSpec, (self.kind, self.dtype, self.tail, self.device, self.children, *dim)

    def describe(self, length: int) -> tuple[str, str]:
        """Return shape and dtype of `length` rows as text: `("[8, *, 2]", "float32")`."""
        dims: list[object] = [length, *self.tail]
        if self.kind == "jagged":
            dims.insert(self.ragged_dim, "*")
        shape = ", ".join(map(str, dims))
        return f"[{shape}]", self.dtype or self.kind


def flat_payload(payload: Payload) -> object:
    """Return a payload with small arrays as lists (dtype, shape, bytes); nothing else is a list."""
    if isinstance(payload, np.ndarray):
        if payload.nbytes > _SMALL or payload.dtype == object:
            return payload
        return [payload.dtype.str, payload.shape, payload.tobytes()]
    if isinstance(payload, tuple):
        return tuple([flat_payload(part) for part in payload])
    return {key: flat_payload(part) for key, part in payload.items()}


def payload_of(flat: Any) -> Any:
    """Return the payload of a flat form."""
    if isinstance(flat, list):
        dtype, shape, data = flat
        return np.frombuffer(data, dtype=dtype).reshape(shape)
    if isinstance(flat, tuple):
        return tuple([payload_of(part) for part in flat])
    if isinstance(flat, dict):
        return {key: payload_of(part) for key, part in flat.items()}
    return flat
