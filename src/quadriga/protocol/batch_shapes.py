"""Functions that change the shape of a batch: padding, folding, and collating single rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns.contents import DataProtoItem
from quadriga.protocol.dataproto import DataProto
from quadriga.protocol.values import operations
from quadriga.protocol.values.field_spec import Array
from quadriga.protocol.values.rows import RowIndices, RowRange

PADDING_FIELD = "__padding__"
"""Array of bool that marks the rows that a call has added. A call within it adds underscores."""


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the front until the length divides. Return `(padded, pad_size)`.

    An empty batch is returned as it is: it has no row to repeat.
    """
    if size_divisor < 1:
        raise LengthError(f"expected a divisor of at least 1 to pad a batch to, got {size_divisor}")
    length = len(data)
    pad_size = -length % size_divisor
    if length == 0 or pad_size == 0:
        return data, 0
    # 3 rows to a multiple of 8: rows 0 1 2 0 1 2 0 1.
    rows = np.arange(length + pad_size, dtype=np.int64) % length
    return data.take_rows(RowIndices(rows)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise LengthError(f"cannot remove {pad_size} padding rows from a batch of {len(data)} rows")
    return data.take_rows(RowRange(0, len(data) - pad_size)) if pad_size else data


def padding_marks(data: DataProto) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that mark padding, by name. There are none if no call has added
    rows."""
    arrays = data.non_tensor_batch
    names = [name for name in arrays if name.startswith(PADDING_FIELD)]
    return {name: np.asarray(arrays[name], dtype=bool) for name in names}


def padding_rows(data: DataProto) -> Tensor:
    """Return [B] bool: whether a row is padding."""
    marked = np.zeros(len(data), dtype=bool)
    for values in padding_marks(data).values():
        marked |= values
    return torch.from_numpy(marked)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Return the batch of single rows. Rows of different shapes become a jagged tensor.

    `meta_info` is that of the first row. Raises `LengthError` for an empty list.
    """
    if not items:
        raise LengthError("collate_fn: expected at least one row, got none")
    first = items[0]
    tensors: dict[str, Tensor] = {}
    if first.batch is not None:
        for key in map(str, first.batch.keys()):
            tensors[key] = _stack([item.batch[key] for item in items])
    arrays = {
        key: operations.object_array([item.non_tensor_batch[key] for item in items])
        for key in first.non_tensor_batch
    }
    return DataProto.from_dict(tensors, arrays, dict(first.meta_info))


def _stack(rows: Sequence[Tensor]) -> Tensor:
    if len({tuple(row.shape) for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape every field from [N, ...] to [new_batch_size, N / new_batch_size, ...].

    Raises `LengthError` unless N divides. Raises `FieldError` for jagged tensors: torch has no
    layout for rows of different lengths below two batch dimensions.
    """
    length = len(data)
    if new_batch_size < 1 or length % new_batch_size:
        raise LengthError(f"{length} rows do not fold into {new_batch_size} equal rows")
    inner = length // new_batch_size
    fields = {
        key: _dense(key, value).reshape(new_batch_size, inner, *value.shape[1:])
        for key, value in _tensors(data)
    }
    return _with(
        data, fields, new_batch_size, lambda a: a.reshape(new_batch_size, inner, *a.shape[1:])
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first `batch_dims` dimensions of every field to one: the inverse of folding.

    Raises `FieldError` for a field with fewer dimensions.
    """
    values: list[tuple[str, Tensor | Array]] = [*_tensors(data), *data.non_tensor_batch.items()]
    for key, value in values:
        if len(value.shape) < batch_dims:
            raise FieldError(
                f"field '{key}' has shape {list(value.shape)}, fewer than {batch_dims} dimensions",
                field=key,
            )
    fields = {
        key: _dense(key, value).reshape(-1, *value.shape[batch_dims:])
        for key, value in _tensors(data)
    }
    length = next((len(v) for v in fields.values()), 0)
    return _with(data, fields, length, lambda a: a.reshape(-1, *a.shape[batch_dims:]))


def _tensors(data: DataProto) -> list[tuple[str, Tensor]]:
    keys = [] if data.batch is None else map(str, data.batch.keys())
    return [(key, data.batch[key]) for key in keys]


def _dense(key: str, value: Tensor) -> Tensor:
    if isinstance(value, Tensor) and value.is_nested:
        raise FieldError(f"field '{key}' is jagged and cannot be folded", field=key)
    return value


def _with(
    data: DataProto,
    fields: dict[str, Tensor],
    length: int,
    fold: Callable[[Array], Array],
) -> DataProto:
    batch = None
    if data.batch is not None:
        batch = TensorDict(dict(fields), batch_size=[length], device=data.batch.device)
    arrays = {key: fold(value) for key, value in data.non_tensor_batch.items()}
    return data.with_contents(batch, arrays)
