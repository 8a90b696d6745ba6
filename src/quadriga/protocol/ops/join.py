"""Union: the fields of two batches in one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tensordict import TensorDict

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.column import Column, Columns
from quadriga.protocol.columns.contents import Contents, MetaInfo, TensorHalf, meta_conflict, show
from quadriga.protocol.columns.remote_batch import RemoteBatch
from quadriga.protocol.values import operations
from quadriga.protocol.values.field_spec import Array


def union(mine: Contents, other: Contents) -> Contents:
    """Return the fields of both batches.

    Raises `LengthError` for different lengths, `ConflictError` for a key with two values.
    """
    if _has_fields(mine) and _has_fields(other) and mine.rows != other.rows:
        raise LengthError(
            f"union joins batches of the same length; this one has {mine.rows} rows, "
            f"the other has {other.rows}"
        )
    batch = _union_tensors(mine.batch, other.batch)
    arrays = _union_columns(halves.array_columns(mine.arrays), halves.array_columns(other.arrays))
    return Contents(batch, halves.make_arrays(arrays), union_meta(mine.meta, other.meta))


def _has_fields(contents: Contents) -> bool:
    return contents.batch is not None or bool(contents.arrays)


def _union_tensors(a: TensorHalf, b: TensorHalf) -> TensorHalf:
    if a is None or b is None:
        return halves.select(b if a is None else a, None)
    _check_sizes(a, b)
    fields = _union_columns(halves.tensor_columns(a), halves.tensor_columns(b))
    return halves.make_batch(a, fields, int(a.batch_size[0]))


def _union_columns(mine: Columns, other: Columns) -> dict[str, Column]:
    """Return all columns of both. Raises `ConflictError` for a key with two values."""
    for key, column in other.items():
        if key in mine and not columns.same(mine[key], column, key):
            raise _conflict(key, columns.read(mine[key], key), columns.read(column, key))
    return {**mine, **{key: column for key, column in other.items() if key not in mine}}


def _check_sizes(a: TensorDict | RemoteBatch, b: TensorDict | RemoteBatch) -> None:
    if tuple(a.batch_size) != tuple(b.batch_size):
        raise LengthError(
            f"union joins batches of the same size; got {list(a.batch_size)} and "
            f"{list(b.batch_size)}"
        )


def union_meta(a: Mapping[str, object], b: Mapping[str, object]) -> MetaInfo:
    """Return both dicts as one. Raises `ConflictError` for a key with two values."""
    for key, value in b.items():
        if key in a and not operations.same(a[key], value):
            raise meta_conflict(key, a[key], value, "a union")
    return {**a, **b}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first and return it.

    A key of both keeps the tensor of the first, also where only the dtypes differ. Raises
    `LengthError` when batch sizes differ and `ConflictError` naming the key when both have it with
    different values (NaN equals NaN).
    """
    _check_sizes(tensor_dict1, tensor_dict2)
    known = set(tensor_dict1.keys())
    for key, _ in tensor_dict2.items():
        # `items` yields the containers of tensordict in place of lists of objects.
        if key in known and not operations.same_values(tensor_dict1[key], tensor_dict2[key]):
            raise _conflict(key, tensor_dict1[key], tensor_dict2[key])
    for key, value in tensor_dict2.items():
        if key not in known:
            tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, Array], tensor_dict2: dict[str, Array]
) -> dict[str, Array]:
    """Add the arrays of the second to the first and return it.

    Raises `ConflictError` naming the key when both have it with different values (NaN equals NaN,
    objects are compared deeply).
    """
    for key, value in tensor_dict2.items():
        if not isinstance(value, np.ndarray):
            raise FieldError(
                f"field '{key}': expected a numpy array, got {type(value).__name__}", field=key
            )
        if key in tensor_dict1 and not operations.same(tensor_dict1[key], value):
            raise _conflict(key, tensor_dict1[key], value)
    for key, value in tensor_dict2.items():
        tensor_dict1.setdefault(key, value)
    return tensor_dict1


def _conflict(key: str, mine: object, other: object) -> ConflictError:
    return ConflictError(
        f"field '{key}' has different values in the two batches of a union: "
        f"{show(mine)} and {show(other)}. Rename one, or pop it first",
        field=key,
    )
