"""One field at a time: what every kind of column value can do.

A column value is a dense tensor, a jagged nested tensor, a nested `TensorDict`, or a numpy array
(object dtype for anything that is not a number). Dimension 0 is the batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from quadriga.errors import FieldError
from quadriga.protocol.values import buffer_pool as memory
from quadriga.protocol.values import jagged
from quadriga.protocol.values.row_selection import RowOp, Span

Value = Any  # torch.Tensor | TensorDictBase | np.ndarray


def object_array(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """A one-dimensional object array; each item stays as it is, lists included."""
    array = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def row_count(value: Value) -> int:
    """Length of dimension 0; -1 when the value has no dimensions."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return int(value.size(0))
    return int(value.shape[0]) if len(value.shape) else -1


def nbytes(value: Value) -> int:
    """Bytes of the payload; for object arrays the bytes of the references only."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            values, offsets = jagged.parts(value)
            return nbytes(values) + nbytes(offsets)
        return value.numel() * value.element_size()
    if isinstance(value, TensorDictBase):
        return sum(nbytes(v) for v in value.values(include_nested=True, leaves_only=True))
    return int(value.nbytes)


def take(value: Value, op: RowOp) -> Value:
    """The chosen rows of one value: a view for a `Span`, a copy for a `Take`."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return jagged.take(value, op)
    if isinstance(op, Span):
        return value[op.start : op.stop]
    if isinstance(value, torch.Tensor):
        return _take_rows(value, torch.from_numpy(op.rows).to(value.device))
    if isinstance(value, TensorDictBase):
        return value[torch.from_numpy(op.rows)]
    return value[op.rows]


def _take_rows(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    shape = (len(rows), *value.shape[1:])
    if not memory.is_plain(value) or math.prod(shape) * value.element_size() < memory.LENT_BYTES:
        return value[rows]
    return torch.index_select(value, 0, rows, out=memory.empty(shape, value.dtype))


def _concat_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first = parts[0]
    like_first = all(
        memory.is_plain(p) and p.dtype == first.dtype and p.shape[1:] == first.shape[1:]
        for p in parts
    )
    if not like_first or sum(p.numel() for p in parts) * first.element_size() < memory.LENT_BYTES:
        return torch.cat(list(parts), dim=0)
    rows = sum(len(p) for p in parts)
    out = memory.empty((rows, *first.shape[1:]), first.dtype)
    return torch.cat(list(parts), dim=0, out=out)


def row(value: Value, index: int) -> Any:
    """One row without its batch dimension (of a jagged tensor: a dense tensor)."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        values, offsets = jagged.parts(value)
        return values[int(offsets[index]) : int(offsets[index + 1])]
    return value[index]


def concat(values: Sequence[Value], key: str) -> Value:
    """Rows of all values one after the other. Raises `FieldError` naming `key` when they differ."""
    if len(values) == 1:
        return values[0]
    try:
        if all(isinstance(v, np.ndarray) for v in values):
            return np.concatenate(values, axis=0)
        if any(jagged.is_jagged(v) for v in values):
            return jagged.concat(values)
        if all(isinstance(v, torch.Tensor) for v in values):
            return _concat_rows(values)
        return torch.cat(list(values), dim=0)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        shapes = ", ".join(describe(v) for v in values)
        raise FieldError(
            f"the parts of field '{key}' cannot be joined along the batch dimension: {shapes}",
            field=key,
        ) from error


def describe(value: Value) -> str:
    """Shape and dtype in a few characters, for messages."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"jagged [{row_count(value)}, *] {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, TensorDictBase):
        return f"TensorDict {list(value.batch_size)}"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def clone(value: Value) -> Value:
    """A private copy: no memory shared with `value`, objects inside arrays copied too."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        values, offsets = jagged.parts(value)
        return jagged.build(values.clone(), offsets.clone())
    if isinstance(value, torch.Tensor | TensorDictBase):
        return value.clone()
    return copy.deepcopy(value)


def same(a: Any, b: Any) -> bool:
    """Deep equality of any two values: type, dtype, shape and content; NaN equals NaN."""
    return _same(a, b, frozenset())


def _same(a: Any, b: Any, above: frozenset[tuple[int, int]]) -> bool:
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if not isinstance(a, np.ndarray | Mapping | list | tuple | TensorDictBase):
        return bool(a == b)
    pair = (id(a), id(b))
    if pair in above:  # a container that holds itself: this branch adds nothing new
        return True
    return _same_container(a, b, above | {pair})


def _same_container(a: Any, b: Any, above: frozenset[tuple[int, int]]) -> bool:
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype != object:
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
        return all(_same(x, y, above) for x, y in zip(a.flat, b.flat, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, above) for x, y in zip(a, b, strict=True))
    return set(a.keys()) == set(b.keys()) and all(_same(a[k], b[k], above) for k in a.keys())  # noqa: SIM118


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and jagged.equal(a, b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    return jagged.same_dense(a, b)


def as_tensordict(
    source: Mapping[str, Value], batch_size: Sequence[int], device: Any
) -> TensorDict:
    """A `TensorDict` over local values that were checked already."""
    return TensorDict(dict(source), batch_size=list(batch_size), device=device)
