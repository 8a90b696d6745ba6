"""Folding: trading rows for a second batch dimension, and columns for rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import FieldError, LengthError
from quadriga.protocol import values
from quadriga.protocol.rowops import Take

if TYPE_CHECKING:
    from quadriga.protocol.dataproto import DataProto

    D = TypeVar("D", bound=DataProto)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[N, ...] becomes [new_batch_size, N / new_batch_size, ...] in every field.

    Raises `LengthError` unless N divides, `FieldError` for jagged tensors.
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
    """The first `batch_dims` dimensions of every field become one: the inverse of folding."""
    for key, value in [*_tensors(data), *data.non_tensor_batch.items()]:
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


def unfold_column_chunks(data: D, n_split: int, split_keys: Sequence[str]) -> D:
    """See `DataProto.unfold_column_chunks`."""
    length = len(data)
    op = Take(np.repeat(np.arange(length, dtype=np.int64), n_split))
    known = [key for key, _ in _tensors(data)] + list(data.non_tensor_batch)
    for key in split_keys:
        if key not in known:
            raise FieldError(f"no field '{key}' to split; there are: {', '.join(known)}", field=key)
    fields = {
        key: _cut(key, value, n_split) if key in split_keys else values.take(value, op)
        for key, value in _tensors(data)
    }
    arrays = {
        key: _cut(key, value, n_split) if key in split_keys else values.take(value, op)
        for key, value in data.non_tensor_batch.items()
    }
    batch = None
    if data.batch is not None:
        batch = values.as_tensordict(fields, (length * n_split,), data.batch.device)
    return type(data)(batch, arrays, dict(data.meta_info))


def _cut(key: str, value: Any, n_split: int) -> Any:
    if len(value.shape) < 2 or _dense(key, value).shape[1] % n_split:
        raise LengthError(
            f"field '{key}' with shape {list(value.shape)} has no dimension 1 that divides into "
            f"{n_split} columns",
            field=key,
        )
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _tensors(data: DataProto) -> list[tuple[str, Any]]:
    return [] if data.batch is None else list(data.batch.items())


def _dense(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise FieldError(f"field '{key}' is jagged and cannot be folded", field=key)
    return value


def _with(data: DataProto, fields: dict[str, Any], length: int, fold: Any) -> DataProto:
    batch = None
    if data.batch is not None:
        batch = TensorDict(fields, batch_size=[length], device=data.batch.device)
    arrays = {key: fold(value) for key, value in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))
