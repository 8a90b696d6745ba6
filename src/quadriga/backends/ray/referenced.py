"""A reference of Ray among the arguments of a call whose dispatch mode splits batches.

This module loads those of tensors, so it is imported with the first such reference.
"""

import copy
from collections.abc import Sequence
from typing import Any

from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.protocol.boundary import Part, unpack_result
from quadriga.protocol.tensordicts import TensorDictBase


class ReferencedValue(DataProtoFuture):
    """The future of a reference's object. A rank gets its rows of a batch, and any other object.

    The controller does not fetch the object.
    """

    def chunk(self, chunks: int, uneven: bool = False) -> list[DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting."""
        twins = [copy.copy(self) for _ in range(chunks)]
        for twin, part in zip(twins, super().chunk(chunks, uneven), strict=True):
            twin.parts = part.parts
        return list(twins)

    def split(self, like: Part) -> list[Any]:
        """Wait for the object and return all parts of the split to which `like` belongs."""
        value = self.get()
        return [
            Part(i, like.count, like.uneven).of(value) if _is_batch(value) else value
            for i in range(like.count)
        ]

    def _joined(self, packed: Sequence[object]) -> Any:
        value = unpack_result(packed[0])
        for part in self.parts if _is_batch(value) else ():
            value = part.of(value)
        return value


def _is_batch(value: object) -> bool:
    return isinstance(value, DataProto | TensorDictBase)
