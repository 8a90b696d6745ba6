"""Operations on one local value: a dense tensor, a jagged nested tensor, a nested `TensorDict`, or
a numpy array (object dtype for anything that is not a number). Dimension 0 is the batch.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.values import buffer_pool, jagged
from quadriga.protocol.values.field_spec import (
    CARRIER_OF_SIZE,
    NUMPY_KNOWS,
    Array,
    LocalValue,
    ObjectArray,
)
from quadriga.protocol.values.rows import RowRange, RowSelection


def object_array(items: Sequence[object]) -> ObjectArray:
    """Return a one-dimensional object array. Items are not converted, lists included."""
    array: ObjectArray = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def row_count(value: LocalValue) -> int:
    """Return the length of dimension 0; -1 for a value without dimensions."""
    shape = value.shape
    return int(shape[0]) if len(shape) else -1


def nbytes(value: LocalValue) -> int:
    """Return the bytes of the payload; for object arrays the bytes of the references only."""
    if isinstance(value, Tensor):
        if value.is_nested:
            values, offsets = jagged.parts(value)
            return nbytes(values) + nbytes(offsets)
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return sum(nbytes(field) for field in tensors_of(value).values())


def tensors_of(value: TensorDictBase) -> dict[str, Tensor | TensorDictBase]:
    """Return the entries of a `TensorDict`; nested ones are entries themselves."""
    entries: dict[str, Tensor | TensorDictBase] = dict(value.items())  # type: ignore[arg-type]
    return entries


def take(value: LocalValue, selection: RowSelection) -> LocalValue:
    """Return the selected rows: a view for a `RowRange`, a copy for `RowIndices`."""
    if isinstance(value, Tensor) and value.is_nested:
        return jagged.take(value, selection)
    if isinstance(selection, RowRange):
        part: LocalValue = value[selection.start : selection.stop]
        return part
    if isinstance(value, TensorDictBase | Tensor):
        index = torch.from_numpy(selection.rows)
        return _take_rows(value, index) if isinstance(value, Tensor) else value[index]
    rows: Array = value[selection.rows]  # type: ignore[call-overload]  # no TensorDict here
    return rows


def _take_rows(value: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(value.device)
    shape = (len(rows), *value.shape[1:])
    large = math.prod(shape) * value.element_size() >= buffer_pool.POOLED_BYTES
    if not large or not buffer_pool.is_poolable(value):
        return jagged.select_rows(value, rows)
    # torch has no index_select for some dtypes that numpy lacks: their bytes are selected.
    known = value.dtype in NUMPY_KNOWS
    items = value if known else value.view(CARRIER_OF_SIZE[value.element_size()])
    chosen = torch.index_select(items, 0, rows, out=buffer_pool.empty(shape, items.dtype))
    return chosen if known else chosen.view(value.dtype)


def _concat_rows(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    alike = all(
        buffer_pool.is_poolable(p) and p.dtype == first.dtype and p.shape[1:] == first.shape[1:]
        for p in parts
    )
    large = sum(p.numel() for p in parts) * first.element_size() >= buffer_pool.POOLED_BYTES
    if not large or not alike:
        return torch.cat(list(parts), dim=0)
    rows = sum(len(p) for p in parts)
    out = buffer_pool.empty((rows, *first.shape[1:]), first.dtype)
    return torch.cat(list(parts), dim=0, out=out)


def row(value: LocalValue, index: int) -> object:
    """Return one row without its batch dimension (of a jagged tensor: a dense tensor)."""
    if isinstance(value, Tensor) and value.is_nested:
        values, offsets = jagged.parts(value)
        items = values[int(offsets[index]) : int(offsets[index + 1])]
        return items.movedim(0, jagged.ragged_dim(value) - 1)
    found: object = value[index]
    return found


def concat(values: Sequence[LocalValue], key: str) -> LocalValue:
    """Return the rows of all values in order, as new memory even for a single value.

    Raises `FieldError` naming `key` when types, dtypes or shapes do not fit together.
    """
    if len(values) == 1:
        only = values[0]
        return only.copy() if isinstance(only, np.ndarray) else clone(only)
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    try:
        if len(arrays) == len(values):
            masked = any(isinstance(array, np.ma.MaskedArray) for array in arrays)
            # np.concatenate would return a masked array without its mask.
            numpy_module = np.ma if masked else np
            joined_arrays: Array = numpy_module.concatenate(arrays, axis=0)
            return joined_arrays
        if any(jagged.is_jagged(value) for value in tensors):
            return jagged.concat(_all_tensors(values, tensors))
        if tensors:
            return _concat_rows(_all_tensors(values, tensors))
        joined: LocalValue = torch.cat(list(values), dim=0)  # type: ignore[arg-type]  # TensorDicts
        return joined
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        shapes = ", ".join(describe(value) for value in values)
        raise FieldError(
            f"the parts of field '{key}' cannot be concatenated along the batch dimension: "
            f"{shapes}",
            field=key,
        ) from error


def _all_tensors(values: Sequence[LocalValue], tensors: list[Tensor]) -> list[Tensor]:
    if len(tensors) != len(values):
        raise TypeError("tensors and other values")
    return tensors


def describe(value: object) -> str:
    """Return shape and dtype in a few characters, for messages."""
    if isinstance(value, Tensor) and value.is_nested:
        return f"jagged [{row_count(value)}, *] {dtype_name(value.dtype)}"
    if isinstance(value, Tensor | np.ndarray):
        return f"{list(value.shape)} {dtype_name(value.dtype)}"
    if isinstance(value, TensorDictBase):
        return f"TensorDict {list(value.batch_size)}"
    return type(value).__name__


def dtype_name(dtype: object) -> str:
    """Return "float32" for torch.float32 and for numpy's float32."""
    return str(dtype).removeprefix("torch.")


def clone(value: LocalValue) -> LocalValue:
    """Return a private copy that shares no memory; objects inside arrays are copied too."""
    if isinstance(value, Tensor) and value.is_nested:
        values, offsets = jagged.parts(value)
        return jagged.build(values.clone(), offsets.clone(), jagged.ragged_dim(value))
    if isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    return value.clone()


def same(a: object, b: object) -> bool:
    """Return whether two values of any type are deeply equal: type, dtype, shape and content.

    NaN equals NaN.
    """
    return _same(a, b, frozenset())


def same_values(a: object, b: object) -> bool:
    """Return whether two values are deeply equal, where two tensors may differ in their dtype.

    A mask of ones is the same in int64 and in float32; 2²⁴ + 1 in int64 is no number of float32.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
        # Both ways, because one way rounds: 2²⁴ + 1 becomes 2²⁴ in float32.
        return _same_tensor(a.to(b.dtype), b) and _same_tensor(a, b.to(a.dtype))
    return same(a, b)


_CONTAINERS = (np.ndarray, Mapping, list, tuple, deque, TensorDictBase)


def _same(a: object, b: object, above: frozenset[tuple[int, int]]) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_tensor(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    has_fields = is_dataclass(a) and not isinstance(a, type)
    if not has_fields and not isinstance(a, _CONTAINERS):
        try:
            return bool(a == b)
        except (RuntimeError, ValueError):  # of tensors or arrays inside: their `==` has no truth
            return False
    # a = [1, a] and b = [1, b] are equal; comparing their second items compares a and b again.
    pair = (id(a), id(b))
    if pair in above:
        return True
    if has_fields:
        a, b = _fields(a), _fields(b)
    return _same_container(a, b, above | {pair})


def _same_container(a: object, b: object, above: frozenset[tuple[int, int]]) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
        return all(_same(x, y, above) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return len(a) == len(b) and all(_same(x, y, above) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping | TensorDictBase) and isinstance(b, Mapping | TensorDictBase):
        keys = set(a.keys())
        return keys == set(b.keys()) and all(_same(a[key], b[key], above) for key in keys)
    return False


def _fields(value: Any) -> dict[str, object]:
    """Return the fields of an instance of a dataclass."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and jagged.equal(a, b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    return jagged.same_dense(a, b)


def as_tensordict(
    source: Mapping[str, LocalValue], batch_size: Sequence[int], device: torch.device | None
) -> TensorDict:
    """Return a `TensorDict` of local values whose lengths were checked before."""
    return TensorDict(dict(source), batch_size=list(batch_size), device=device)
