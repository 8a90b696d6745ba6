"""Jagged nested tensors: rows of different lengths, stored as `values` and `offsets`.

Layout `torch.jagged`. One dimension after the batch dimension is ragged: dimension 1 of token ids
[B, T*], dimension 2 of multimodal position ids [B, 3, T*]. The functions below see `values` with
the ragged dimension first ([total, ...]), whichever it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import FieldError
from quadriga.protocol.values.field_spec import Ints
from quadriga.protocol.values.rows import RowRange, RowSelection

# Row i is values[offsets[i] : offsets[i + 1]]. Three rows of 2, 0 and 3 numbers:
#
#     rows       [7, 8]   []   [4, 5, 6]
#     values      7  8          4  5  6
#     offsets     0        2    2        5
#
#     take rows [2, 0]   positions in values 2 3 4 | 0 1 → values 4 5 6 7 8, offsets 0 3 5
#     take rows 1 … 2    values[2:5] → 4 5 6, offsets [2, 2, 5] - 2 → 0 0 3; a view
#     concat with [[9]]  values 7 8 4 5 6 9, offsets 0 2 2 5 6: those of the second part plus 5


def is_jagged(value: object) -> bool:
    """Return True for a nested tensor of any layout (`parts` refuses those that are not jagged)."""
    return isinstance(value, Tensor) and value.is_nested


def ragged_dim(nested: Tensor) -> int:
    """Return the dimension of a jagged tensor that is ragged, 1 or more."""
    return int(getattr(nested, "_ragged_idx", 1))


def parts(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return `(values [total, ...], offsets [N + 1])` without holes.

    Values are a view with the ragged dimension first: of [3, 5] values of position ids, [5, 3].
    Raises `FieldError` for a nested tensor of another layout.
    """
    if nested.layout != torch.jagged:
        raise FieldError(
            f"expected a nested tensor of layout torch.jagged, got layout {nested.layout}. "
            "Build it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    if nested.lengths() is not None:  # type: ignore[attr-defined]  # a method of NestedTensor
        nested = nested.contiguous()
    values: Tensor = nested.values()
    dim = ragged_dim(nested)
    values = values if dim == 1 else values.movedim(dim - 1, 0)
    return values, nested.offsets()  # type: ignore[attr-defined]  # of NestedTensor


def build(values: Tensor, offsets: Tensor, dim: int = 1) -> Tensor:
    """Return the nested tensor of `parts`, ragged in dimension `dim`."""
    if dim > 1:
        values = values.movedim(0, dim - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


def row_gather(offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the positions in `values` of the chosen rows, and the offsets of the result."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    # Rows [2, 0]: starts 2 0, new offsets 0 3 5. The first three positions 0 1 2 are shifted by
    # 2 - 0 = 2, the last two positions 3 4 by 0 - 3 = -3, which gives 2 3 4 0 1.
    positions = np.arange(new_offsets[-1], dtype=np.int64)
    positions += np.repeat(starts - new_offsets[:-1], lengths)
    return positions, new_offsets


def take(nested: Tensor, selection: RowSelection) -> Tensor:
    """Return the selected rows as a nested tensor; differentiable in the values."""
    values, offsets = parts(nested)
    if isinstance(selection, RowRange):
        low, high = int(offsets[selection.start]), int(offsets[selection.stop])
        chosen = offsets[selection.start : selection.stop + 1]
        return build(values[low:high], chosen - offsets[selection.start], ragged_dim(nested))
    known: Ints = offsets.cpu().numpy().astype(np.int64)
    positions, new_offsets = row_gather(known, selection.rows)
    index = torch.from_numpy(positions).to(values.device)
    new = torch.from_numpy(new_offsets).to(offsets.device, offsets.dtype)
    return build(select_rows(values, index), new, ragged_dim(nested))


def select_rows(value: Tensor, rows: Tensor) -> Tensor:
    """Return the chosen rows of a dense tensor of any dtype; differentiable."""
    try:
        return value[rows]
    except NotImplementedError:  # float4: torch cannot index it, so its bytes are indexed
        return value.view(torch.uint8)[rows].view(value.dtype)


def concat(nested: Sequence[Tensor]) -> Tensor:
    """Return the rows of all nested tensors in order."""
    dims = {ragged_dim(part) for part in nested}
    if len(dims) > 1:
        raise TypeError(f"ragged in different dimensions: {sorted(dims)}")
    pairs = [parts(part) for part in nested]
    values = torch.cat([v for v, _ in pairs])
    shifted, base = [pairs[0][1][:1]], 0
    for _, offsets in pairs:
        shifted.append(offsets[1:] + base)
        base += int(offsets[-1])
    return build(values, torch.cat(shifted), dims.pop())


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether row lengths and values are equal; NaN equals NaN."""
    (values_a, offsets_a), (values_b, offsets_b) = parts(a), parts(b)
    return (
        ragged_dim(a) == ragged_dim(b)
        and values_a.shape == values_b.shape
        and values_a.dtype == values_b.dtype
        and torch.equal(offsets_a.long().cpu(), offsets_b.long().cpu())
        and same_dense(values_a, values_b)
    )


def same_dense(a: Tensor, b: Tensor) -> bool:
    """Return whether two dense tensors of one shape are equal; NaN equals NaN."""
    if a.dtype == torch.complex32:
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    try:
        if torch.equal(a, b):
            return True
    except NotImplementedError:  # float4: torch cannot compare it, so its bytes are compared
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
