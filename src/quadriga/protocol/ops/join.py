"""Joining batches: `concat` along the rows, `union` along the fields, and their `meta_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as batches
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.values import operations as values

METRICS = "metrics"


def concat(parts: Sequence[Contents]) -> Contents:
    """Rows of all parts in order. Raises `FieldError` when a field is missing in one of them."""
    if not parts:
        raise LengthError("concat needs at least one batch; got an empty list")
    halves = [part.batch for part in parts]
    _check_same_keys([None if half is None else half.keys() for half in halves], "batch")
    _check_same_keys([part.arrays.keys() for part in parts], "non_tensor_batch")
    batch = halves[0]
    if batch is not None:
        fields = columns.concat([batches.tensor_columns(half) for half in halves])
        batch = batches.make_batch(batch, fields, sum(part.rows for part in parts))
    arrays = columns.concat([batches.array_columns(part.arrays) for part in parts])
    return Contents(batch, batches.make_arrays(arrays), merge_meta([part.meta for part in parts]))


def _check_same_keys(keys: Sequence[Any], kind: str) -> None:
    first = keys[0]
    for i, other in enumerate(keys[1:], start=1):
        if (first is None) != (other is None):
            with_tensors, without = (i, 0) if first is None else (0, i)
            raise FieldError(
                f"part {with_tensors} of a concat has tensors and part {without} has none"
            )
        if first is None or set(first) == set(other):
            continue
        key = sorted(set(first) ^ set(other))[0]
        has, lacks = (0, i) if key in set(first) else (i, 0)
        raise FieldError(
            f"field '{key}' of {kind} is in part {has} of a concat but not in part {lacks}; "
            "select the common fields first",
            field=key,
        )


def merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One `meta_info` of many: equal values stay; under `metrics`, dicts and lists of dicts become
    one dict of lists. Raises `ConflictError` for any other key with different values."""
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for i, meta in enumerate(metas):
        for key, value in meta.items():
            if key == METRICS:
                metrics.extend(_metric_dicts(value, i))
            elif key not in merged:
                merged[key] = value
            elif not values.same(merged[key], value):
                raise _meta_conflict(key, merged[key], value, f"part {i} of a concat")
    if metrics:
        merged[METRICS] = _dict_of_lists(metrics)
    return merged


def _metric_dicts(value: Any, part: int) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    dicts = value if isinstance(value, list) else [value]
    for entry in dicts:
        if not isinstance(entry, Mapping):
            raise FieldError(
                f"meta_info['{METRICS}'] of part {part} is a dict or a list of dicts; "
                f"got {type(entry).__name__}",
                field=METRICS,
            )
    return dicts


def _dict_of_lists(dicts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for entry in dicts:
        for name, value in entry.items():
            joined.setdefault(name, []).append(value)
    return joined


def union(mine: Contents, theirs: Contents) -> Contents:
    """The fields of both, after every conflict has been looked for."""
    if _has_fields(mine) and _has_fields(theirs) and mine.rows != theirs.rows:
        raise LengthError(
            f"union joins batches of the same length; this one has {mine.rows} rows, "
            f"the other has {theirs.rows}"
        )
    batch = _union_batches(mine.batch, theirs.batch)
    arrays = _union_columns(
        batches.array_columns(mine.arrays), batches.array_columns(theirs.arrays)
    )
    return Contents(batch, batches.make_arrays(arrays), union_meta(mine.meta, theirs.meta))


def _has_fields(contents: Contents) -> bool:
    return contents.batch is not None or bool(contents.arrays)


def _union_batches(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return batches.select(b if a is None else a, None)
    _check_sizes(a, b)
    fields = _union_columns(batches.tensor_columns(a), batches.tensor_columns(b))
    return batches.make_batch(a, fields, int(a.batch_size[0]))


def _union_columns(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of both. Raises `ConflictError` for a key with two values."""
    for key, column in theirs.items():
        if key in mine and not columns.same(mine[key], column, key):
            raise _conflict(key, columns.local(mine[key]), columns.local(column))
    return {**mine, **{key: column for key, column in theirs.items() if key not in mine}}


def _check_sizes(a: Any, b: Any) -> None:
    if tuple(a.batch_size) != tuple(b.batch_size):
        raise LengthError(
            f"union joins batches of the same size; got {list(a.batch_size)} and "
            f"{list(b.batch_size)}"
        )


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the tensors of the second to the first and returns it.

    Raises `LengthError` when batch sizes differ and `ConflictError` naming the key when both have
    it with different values (NaN equals NaN).
    """
    _check_sizes(tensor_dict1, tensor_dict2)
    for key, value in tensor_dict2.items():
        if key in tensor_dict1.keys() and not values.same(tensor_dict1[key], value):  # noqa: SIM118
            raise _conflict(key, tensor_dict1[key], value)
    for key, value in tensor_dict2.items():
        if key not in tensor_dict1.keys():  # noqa: SIM118
            tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, np.ndarray[Any, Any]], tensor_dict2: dict[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Adds the arrays of the second to the first and returns it.

    Raises `ConflictError` naming the key when both have it with different values (NaN equals NaN,
    objects compare deeply).
    """
    for key, value in tensor_dict2.items():
        if not isinstance(value, np.ndarray):
            raise FieldError(
                f"field '{key}' is a {type(value).__name__}, not a numpy array", field=key
            )
        if key in tensor_dict1 and not values.same(tensor_dict1[key], value):
            raise _conflict(key, tensor_dict1[key], value)
    for key, value in tensor_dict2.items():
        tensor_dict1.setdefault(key, value)
    return tensor_dict1


def union_meta(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Both dicts in one. Raises `ConflictError` for a key with two values."""
    for key, value in b.items():
        if key in a and not values.same(a[key], value):
            raise _meta_conflict(key, a[key], value, "a union")
    return {**a, **b}


def _conflict(key: str, mine: Any, theirs: Any) -> ConflictError:
    return ConflictError(
        f"field '{key}' has different values in the two batches of a union: "
        f"{_show(mine)} and {_show(theirs)}. Rename one, or pop it first",
        field=key,
    )


def _meta_conflict(key: str, mine: Any, theirs: Any, where: str) -> ConflictError:
    return ConflictError(
        f"meta_info['{key}'] has different values in {where}: {_show(mine)} and {_show(theirs)}",
        field=key,
    )


def _show(value: Any) -> str:
    shape = f"{values.describe(value)} " if hasattr(value, "shape") else ""
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.ravel()[:6].tolist()
    elif hasattr(value, "is_nested") and not value.is_nested and value.dim():
        value = value.detach().flatten()[:6].tolist()
    text = repr(value)
    return shape + (text if len(text) <= 80 else text[:77] + "...")
