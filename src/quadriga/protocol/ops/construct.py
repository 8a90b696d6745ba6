"""Checked construction of a batch, and its conversion from and to dicts and `TensorDict`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns.contents import ArrayHalf, Contents, MetaInfo
from quadriga.protocol.values import operations
from quadriga.protocol.values.field_spec import Array

Tensors = torch.Tensor | TensorDictBase


def check_dicts(
    tensors: Mapping[str, Tensors], non_tensors: Mapping[str, object], num_batch_dims: int
) -> tuple[TensorDict | None, ArrayHalf]:
    """Return the two halves of a batch from plain dicts. Types and lengths are checked."""
    if num_batch_dims < 1:
        raise LengthError(f"expected at least one batch dimension, got {num_batch_dims=}")
    if num_batch_dims > 1 and non_tensors:
        raise LengthError(
            f"non-tensors have one batch dimension, got {num_batch_dims=} "
            f"with non-tensors {list(non_tensors)}"
        )
    _check_mapping("tensors", tensors)
    _check_mapping("non_tensors", non_tensors)
    for key, value in tensors.items():
        _check_tensor(key, value, num_batch_dims)
    batch_size = _common_size(tensors, num_batch_dims)
    batch = None if batch_size is None else operations.as_tensordict(tensors, batch_size, None)
    return batch, {key: as_array(key, value) for key, value in non_tensors.items()}


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise FieldError(f"{name}: expected a dict of fields by name, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise FieldError(f"{name}: expected field names, got {key!r} ({type(key).__name__})")


def _check_tensor(key: str, value: object, num_batch_dims: int) -> None:
    if not isinstance(value, torch.Tensor | TensorDictBase):
        raise FieldError(
            f"field '{key}' in tensors is a {type(value).__name__}, not a tensor; "
            "lists and arrays go into non_tensors",
            field=key,
        )
    if len(value.shape) < num_batch_dims:
        raise FieldError(
            f"field '{key}' has shape {list(value.shape)}; "
            f"it needs at least {num_batch_dims} batch dimension(s)",
            field=key,
        )


def _common_size(tensors: Mapping[str, Tensors], num_batch_dims: int) -> tuple[int, ...] | None:
    first: tuple[str, tuple[int, ...]] | None = None
    for key, value in tensors.items():
        size = tuple(value.shape[:num_batch_dims])
        if first is None:
            first = (key, size)
        elif size != first[1]:
            raise LengthError(
                f"all fields of a batch have the same length: '{first[0]}' has {list(first[1])}, "
                f"'{key}' has {list(size)}",
                field=key,
            )
    return None if first is None else first[1]


def as_array(key: str, value: object) -> Array:
    """Return a numpy array as it is, a list or tuple as a one-dimensional object array."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return operations.object_array(value)
    hint = "it goes into tensors" if isinstance(value, torch.Tensor) else "wrap it in a list"
    raise FieldError(
        f"field '{key}' in non_tensors is a {type(value).__name__}, "
        f"not a numpy array or a list; {hint}",
        field=key,
    )


def sort_by_type(
    data: Mapping[str, object],
) -> tuple[dict[str, Tensors], dict[str, object]]:
    """Separate tensors from everything else that can be a field."""
    _check_mapping("data", data)
    tensors: dict[str, Tensors] = {}
    arrays: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor | TensorDictBase):
            tensors[key] = value
        elif isinstance(value, np.ndarray | list | tuple):
            arrays[key] = value
        else:
            raise FieldError(
                f"field '{key}': expected a tensor, a numpy array or a list, got "
                f"{type(value).__name__}. Settings belong in meta_info",
                field=key,
            )
    return tensors, arrays


def split_tensordict(
    tensor_dict: TensorDictBase | None, meta_info: MetaInfo | None, num_batch_dims: int
) -> Contents:
    """Return the contents of a `TensorDict` that may have non-tensors."""
    meta = dict(meta_info or {})
    if tensor_dict is None:
        return Contents(None, {}, meta)
    tensors: dict[str, Tensors] = {}
    arrays: ArrayHalf = {}
    for key, value in operations.tensors_of(tensor_dict).items():
        if isinstance(value, NonTensorStack):
            arrays[key] = operations.object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            meta[key] = value.data
        else:
            tensors[key] = value
    batch, _ = check_dicts(tensors, {}, num_batch_dims)
    if batch is None and not arrays and tensor_dict.batch_size:
        batch = TensorDict({}, batch_size=tensor_dict.batch_size[:num_batch_dims])
    return Contents(batch, arrays, meta)


def join_tensordict(contents: Contents) -> TensorDict:
    """Return one `TensorDict`: tensors, arrays as `NonTensorStack`, settings as `NonTensorData`.

    Raises `FieldError` when two of them have the same name.
    """
    fields: dict[str, object] = {} if contents.batch is None else dict(contents.batch.items())
    size = [contents.rows] if contents.batch is None else list(contents.batch.batch_size)
    for key, array in contents.arrays.items():
        _check_free(key, fields)
        fields[key] = NonTensorStack(*[NonTensorData(item) for item in array])
    for key, value in contents.meta.items():
        _check_free(key, fields)
        fields[key] = NonTensorData(value, batch_size=size)
    return TensorDict(fields, batch_size=size)


def _check_free(key: str, taken: Mapping[str, object]) -> None:
    if key in taken:
        raise FieldError(
            f"'{key}' names two fields of different kinds; a TensorDict has one name space",
            field=key,
        )
