"""verl's functions that turn tensors into bytes, and its wrapper of all kinds of batches.

Quadriga does not use them: it sends tensors as handles and out-of-band buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from quadriga import protocol
from quadriga.backends.ray.programs import is_reference
from quadriga.compat.verl.controller.futures import DataProtoFuture
from quadriga.compat.verl.tensors.tensordicts import chunk_tensordict, concat_tensordict
from quadriga.errors import FieldError, LengthError

TensorBytes: TypeAlias = tuple[str, Sequence[int], NDArray[np.uint8]]
"""(name of the dtype, shape, bytes)."""
TableBytes: TypeAlias = tuple[tuple[int, ...], str | None, Mapping[str, Any]]
"""(batch size, device, key → `TensorBytes`, or (layout, one `TensorBytes` per row) if nested)."""


def serialize_single_tensor(obj: torch.Tensor) -> TensorBytes:
    """Return dtype, shape and bytes of a tensor on the CPU."""
    # `flatten` gives a tensor without dimensions one, which `view` needs.
    data: NDArray[np.uint8] = obj.detach().contiguous().flatten().view(torch.uint8).numpy()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data


def deserialize_single_tensor(arr: TensorBytes) -> torch.Tensor:
    """Return the tensor of `serialize_single_tensor`, in memory of its own.

    Raises `FieldError` for a dtype that torch does not have.
    """
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FieldError(f"expected the name of a dtype of torch, such as 'float32', got {name!r}")
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0)
    return raw.view(dtype).view(*shape) if len(data) else torch.empty(*shape, dtype=dtype)


def serialize_tensordict(batch: TensorDict) -> TableBytes:
    """Return batch size, device and the bytes of each tensor, row by row for a nested one."""
    items: dict[str, object] = {}
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            raise FieldError(f"field {key!r}: expected a tensor, got {type(value).__name__}")
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            items[key] = layout, [serialize_single_tensor(row) for row in value.unbind()]
        else:
            items[key] = serialize_single_tensor(value)
    return tuple(batch.batch_size), str(batch.device) if batch.device else None, items


def deserialize_tensordict(arr: TableBytes) -> TensorDict:
    """Return the TensorDict of `serialize_tensordict`."""
    size, device, items = arr
    tensors = {}
    for key, item in items.items():
        if len(item) == 2:
            layout, rows = item
            tensors[key] = torch.nested.as_nested_tensor(
                [deserialize_single_tensor(row) for row in rows], layout=getattr(torch, layout)
            )
        else:
            tensors[key] = deserialize_single_tensor(item)
    return TensorDict(dict(tensors), batch_size=list(size), device=device)


class BatchData:
    """A batch of any kind, or a list of batches: `chunk` splits one, `concat` joins several.

    A batch is a `DataProto`, a `DataProtoFuture`, a `TensorDict` or, in a list, a reference of Ray.
    """

    def __init__(self, data: Any) -> None:  # a value of any kind, which the questions are about
        self._data = data

    def is_chunkable(self) -> bool:
        """Return whether `chunk` can split the value."""
        return isinstance(self._data, _BATCHES)

    def is_concatable(self) -> bool:
        """Return whether `concat` can join the list."""
        data = self._data
        if not isinstance(data, list | tuple) or not data:
            return False
        return isinstance(data[0], _BATCHES) or is_reference(data[0])

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Return the parts of the batch, of its own type. Raises `FieldError` for another value."""
        if isinstance(self._data, TensorDict):
            return tuple(chunk_tensordict(self._data, chunks))
        if not self.is_chunkable():
            raise FieldError(f"expected a batch to split, got {type(self._data).__name__}")
        return list(self._data.chunk(chunks))

    def concat(self) -> Any:
        """Return the joined batch. Raises `LengthError` for an empty list, `FieldError` for one of
        other values."""
        data = self._data
        if not data:
            raise LengthError("expected at least one batch to join, got an empty list")
        if not self.is_concatable():
            raise FieldError(f"expected a list of batches to join, got {type(data[0]).__name__}")
        if isinstance(data[0], TensorDict):
            return concat_tensordict(list(data))
        if is_reference(data[0]) or isinstance(data[0], protocol.DataProtoFuture):
            return DataProtoFuture.concat(list(data))
        return protocol.DataProto.concat(list(data))


_BATCHES = (protocol.DataProto, protocol.DataProtoFuture, TensorDict)
