"""Text that describes the fields of a batch. Nothing in this file fetches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from quadriga.protocol import contents as halves
from quadriga.protocol.columns import Column, is_remote, local_value
from quadriga.protocol.contents import Contents
from quadriga.protocol.storage import LocalHandle, Origin, origins_of
from quadriga.protocol.values import (
    LocalValue,
    describe_value,
    dtype_name,
    is_jagged,
    nbytes_of,
    ragged_dim,
)

_GB = 2**30
_HEAD = ("field", "shape", "dtype", "bytes", "stored", "written by")
_LOCAL = "local"


def table(contents: Contents) -> str:
    """Return one line per field: name, shape, dtype, bytes, where it is stored, who wrote it.

    Bytes of local object arrays count the references only.
    """
    fields = _columns(contents)
    lines = [_HEAD, *(_line(key, column) for key, column in fields)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    total = sum(_nbytes(column) for _, column in fields)
    remote = sum(_nbytes(column) for _, column in fields if _stored(column) != _LOCAL)
    head = f"{contents.rows} rows, {len(fields)} fields, {total:,} bytes, {remote:,} of them remote"
    meta = f"meta_info: {', '.join(map(str, contents.meta)) or 'nothing'}"
    return "\n".join([head, *(line.rstrip() for line in text), meta])


def shapes(contents: Contents) -> dict[str, tuple[str, str]]:
    """Return field → (shape, dtype) as text, `("[8, *, 2]", "float32")`; `*` is a ragged size."""
    return {key: _shape_of_column(column) for key, column in _columns(contents)}


def _columns(contents: Contents) -> list[tuple[str, Column]]:
    tensors = halves.tensor_columns(contents.batch)
    return [*tensors.items(), *halves.array_columns(contents.arrays).items()]


def _line(key: str, column: Column) -> tuple[str, ...]:
    origins: Iterable[Origin]
    if is_remote(column):
        origins = (shard.origin for shard in column.row_map.shards)
    else:
        origins = origins_of(local_value(column))
    shape, dtype = _shape_of_column(column)
    return key, shape, dtype, f"{_nbytes(column):,}", _stored(column), writers(origins)


def _shape_of_column(column: Column) -> tuple[str, str]:
    if is_remote(column):
        return column.spec.describe(len(column.row_map))
    return _shape(local_value(column))


def _shape(value: LocalValue) -> tuple[str, str]:
    dtype = dtype_name(getattr(value, "dtype", None) or type(value).__name__)
    if isinstance(value, torch.Tensor) and is_jagged(value):
        dims = ["*" if i == ragged_dim(value) else str(n) for i, n in enumerate(value.shape)]
        return f"[{', '.join(dims)}]", dtype
    return str(list(value.shape)), dtype


def _nbytes(column: Column) -> int:
    return column.nbytes() if is_remote(column) else nbytes_of(local_value(column))


def _stored(column: Column) -> str:
    if not is_remote(column) or all(type(handle) is LocalHandle for handle in column.handles):
        return _LOCAL
    origins = [shard.origin for shard in column.row_map.shards]
    nodes = sorted({origin.node for origin in origins if origin.node})
    return ranks(origins) + (f" on {', '.join(nodes)}" if nodes else "")


def ranks(origins: Iterable[Origin]) -> str:
    """Return `actor[0-3,6], critic[0]`."""
    return ", ".join(_by_name((origin.role, origin.rank) for origin in origins))


def _by_name(pairs: Iterable[tuple[str, int]]) -> list[str]:
    """Return `name[ranks]` of each name."""
    found: dict[str, set[int]] = {}
    for name, rank in pairs:
        found.setdefault(name, set()).add(rank)
    return [f"{name}[{_ranges(sorted(numbers))}]" for name, numbers in found.items()]


def _ranges(numbers: list[int]) -> str:
    # 0 1 2 3 6 → [0, 3], [6] → "0-3,6"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, pair)) for pair in ranges)


def writers(origins: Iterable[Origin]) -> str:
    """Return `actor.compute_log_prob[0-3]`, or "controller" for values that no worker wrote."""
    listed = list(origins)
    methods = _by_name((f"{o.role}.{o.method}", o.rank) for o in listed if o.method)
    roles = dict.fromkeys(origin.role for origin in listed if not origin.method)
    return ", ".join([*methods, *roles]) or "controller"


def data_info(contents: Contents) -> str:
    """Return the fields of each half with shape and dtype, and the types in `meta_info`."""
    lines = []
    named_halves: dict[str, Mapping[str, Column]] = {
        "batch": halves.tensor_columns(contents.batch),
        "non_tensor_batch": halves.array_columns(contents.arrays),
    }
    for name, half in named_halves.items():
        lines.append(name)
        for key, column in half.items():
            _, shape, dtype, _, stored, _ = _line(key, column)
            lines.append(f"  {key}: {shape} ({dtype}) {stored}")
    lines.append("meta_info")
    lines += [f"  {key}: {_type_of(value)}" for key, value in contents.meta.items()]
    return "\n".join(lines)


def _type_of(value: object) -> str:
    if isinstance(value, list):
        inner = sorted({_type_of(v) for v in value[:3]})
        return f"list[{' | '.join(inner)}]" if inner else "list"
    if isinstance(value, tuple):
        return f"tuple[{', '.join(_type_of(v) for v in value)}]"
    if isinstance(value, dict) and value:
        key, first = next(iter(value.items()))
        return f"dict[{_type_of(key)}, {_type_of(first)}]"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{type(value).__name__} {describe_value(value)}"
    return type(value).__name__


def size_line(contents: Contents, prefix: str) -> str:
    """Return the sizes of both halves in GB (2**30 bytes)."""
    sizes = [
        sum(_nbytes(column) for column in half.values()) / _GB
        for half in (halves.tensor_columns(contents.batch), halves.array_columns(contents.arrays))
    ]
    text = f"tensors {sizes[0]:.6f} GB, non-tensors {sizes[1]:.6f} GB"
    return f"{prefix}, {text}" if prefix else text
