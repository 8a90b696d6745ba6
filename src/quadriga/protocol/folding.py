"""Folding: trading rows for a second batch dimension."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.dataproto import DataProto


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[N, ...] becomes [new_batch_size, N / new_batch_size, ...] in every field.

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
