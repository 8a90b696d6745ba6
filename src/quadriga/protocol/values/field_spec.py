"""What is known of a field without its bytes, and the form in which its bytes travel.

A payload is made of numpy arrays, which pickle protocol 5 carries out of band: no byte is copied on
the way into shared memory but once, and none to look at it there. Payloads by kind:

    tensor    ndarray [N, ...]; what numpy lacks (bfloat16, float8 …) as integers of its size
    jagged    (values ndarray [total, ...], offsets [N+1] int64)
    tree      {key: payload}: a nested TensorDict
    array     ndarray [N, ...] that holds no objects
    objects   (bytes uint8 [total], offsets [N+1] int64): each row pickled by itself
    raw       object ndarray: rows that only the transport's own pickler can handle
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

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
