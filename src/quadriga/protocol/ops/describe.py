"""What a batch holds, as text. Nothing here fetches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from quadriga.protocol.columns import contents as batches
from quadriga.protocol.columns.column import is_remote, local
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.values import operations as values
from quadriga.protocol.values.jagged import is_jagged
from quadriga.protocol.values.provenance import origins_of
from quadriga.protocol.values.storage import LocalHandle, Origin

_GB = 2**30
_HEAD = ("field", "shape", "dtype", "bytes", "lies", "written by")


def table(contents: Contents) -> str:
    """One line a field: name, shape, dtype, bytes, where it lies, who wrote it.

    Bytes of object arrays that are here count the references only.
    """
    fields = _columns(contents)
    lines = [_HEAD, *(_line(key, column) for key, column in fields)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    total = sum(_nbytes(column) for _, column in fields)
    away = sum(_nbytes(column) for _, column in fields if _lies(column) != "here")
    head = (
        f"{contents.rows} rows, {len(fields)} fields, {total:,} bytes, {away:,} of them elsewhere"
    )
    meta = f"meta_info: {', '.join(map(str, contents.meta)) or 'nothing'}"
    return "\n".join([head, *(line.rstrip() for line in text), meta])


def _columns(contents: Contents) -> list[tuple[str, Any]]:
    tensors = batches.tensor_columns(contents.batch)
    return [*tensors.items(), *batches.array_columns(contents.arrays).items()]


def _line(key: str, column: Any) -> tuple[str, ...]:
    if is_remote(column):
        shape, dtype = column.spec.describe(len(column.rows))
        makers: Iterable[Origin] = (block.origin for block in column.rows.blocks)
    else:
        value = local(column)
        makers = origins_of(value)
        shape, dtype = _shape(value)
    return key, shape, dtype, f"{_nbytes(column):,}", _lies(column), writers(makers)


def _shape(value: Any) -> tuple[str, str]:
    if is_jagged(value):
        tail = "".join(f", {n}" for n in value.values().shape[1:])
        return f"[{values.row_count(value)}, *{tail}]", str(value.dtype).removeprefix("torch.")
    dtype = str(getattr(value, "dtype", None) or type(value).__name__)
    return str(list(value.shape)), dtype.removeprefix("torch.")


def _nbytes(column: Any) -> int:
    return int(column.nbytes()) if is_remote(column) else values.nbytes(local(column))


def _lies(column: Any) -> str:
    if not is_remote(column) or all(type(h) is LocalHandle for h in column.handles):
        return "here"
    makers = [block.origin for block in column.rows.blocks]
    nodes = sorted({origin.node for origin in makers if origin.node})
    return ranks(makers) + (f" on {', '.join(nodes)}" if nodes else "")


def ranks(origins: Iterable[Origin]) -> str:
    """`actor[0-3,6], critic[0]`."""
    return ", ".join(_by_name((origin.role, origin.rank) for origin in origins))


def _by_name(pairs: Iterable[tuple[str, int]]) -> list[str]:
    """`name[ranks]` of each name."""
    found: dict[str, set[int]] = {}
    for name, rank in pairs:
        found.setdefault(name, set()).add(rank)
    return [f"{name}[{_spans(sorted(numbers))}]" for name, numbers in found.items()]


def _spans(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ",".join("-".join(map(str, span)) for span in spans)


def writers(origins: Iterable[Origin]) -> str:
    """`actor.compute_log_prob[0-3]`, or "controller" for values that were made here."""
    makers = list(origins)
    methods = _by_name((f"{o.role}.{o.method}", o.rank) for o in makers if o.method)
    here = dict.fromkeys(origin.role for origin in makers if not origin.method)
    return ", ".join([*methods, *here]) or "controller"


def data_info(contents: Contents) -> str:
    """Fields with shape and dtype, half by half, and the types inside `meta_info`."""
    lines = ["batch"]
    halves = (
        batches.tensor_columns(contents.batch),
        batches.array_columns(contents.arrays),
    )
    for column_of, head in zip(halves, (None, "non_tensor_batch"), strict=True):
        if head:
            lines.append(head)
        for key, column in column_of.items():
            _, shape, dtype, _, lies, _ = _line(key, column)
            lines.append(f"  {key}: {shape} ({dtype}) {lies}")
    lines.append("meta_info")
    lines += [f"  {key}: {_type_of(value)}" for key, value in contents.meta.items()]
    return "\n".join(lines)


def _type_of(value: Any) -> str:
    if isinstance(value, list):
        inner = sorted({_type_of(v) for v in value[:3]})
        return f"list[{' | '.join(inner)}]" if inner else "list"
    if isinstance(value, tuple):
        return f"tuple[{', '.join(_type_of(v) for v in value)}]"
    if isinstance(value, dict) and value:
        key, first = next(iter(value.items()))
        return f"dict[{_type_of(key)}, {_type_of(first)}]"
    if isinstance(value, np.ndarray) or hasattr(value, "layout"):
        return f"{type(value).__name__} {values.describe(value)}"
    return type(value).__name__


def size_line(contents: Contents, prefix: str) -> str:
    """Sizes of both halves in GB (2**30 bytes)."""
    sizes = []
    for half in (batches.tensor_columns(contents.batch), batches.array_columns(contents.arrays)):
        sizes.append(sum(_nbytes(column) for column in half.values()) / _GB)
    text = f"tensors {sizes[0]:.6f} GB, non-tensors {sizes[1]:.6f} GB"
    return f"{prefix}, {text}" if prefix else text
