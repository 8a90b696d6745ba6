"""Jagged nested tensors: rows of different lengths held as one `values` and one `offsets` tensor.

Row `i` is `values[offsets[i]:offsets[i+1]]`. Only the layout `torch.jagged` with the ragged
dimension right after the batch dimension is supported, which is what this field uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.errors import FieldError
from quadriga.protocol.values.row_selection import RowOp, Span


def is_jagged(value: object) -> bool:
    """True for a nested tensor of any layout (`parts` refuses those that are not jagged)."""
    return isinstance(value, torch.Tensor) and value.is_nested


def parts(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`(values [total, ...], offsets [N+1])`, no holes. Raises `FieldError` for other layouts."""
    if nested.layout != torch.jagged or getattr(nested, "_ragged_idx", 1) != 1:
        raise FieldError(
            "nested tensors travel in layout torch.jagged with the ragged dimension second; "
            f"got layout {nested.layout}. "
            "Build it with torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    if nested.lengths() is not None:
        nested = nested.contiguous()
    return nested.values(), nested.offsets()


def build(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The nested tensor of `parts`."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def row_gather(
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Positions in `values` of the chosen rows, and the offsets of the result."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    new_offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=new_offsets[1:])
    positions = np.arange(new_offsets[-1], dtype=np.int64)
    positions += np.repeat(starts - new_offsets[:-1], lengths)
    return positions, new_offsets


def take(nested: torch.Tensor, op: RowOp) -> torch.Tensor:
    """The chosen rows of a nested tensor, as a nested tensor; differentiable in the values."""
    values, offsets = parts(nested)
    if isinstance(op, Span):
        low, high = int(offsets[op.start]), int(offsets[op.stop])
        return build(values[low:high], offsets[op.start : op.stop + 1] - offsets[op.start])
    positions, new_offsets = row_gather(offsets.cpu().numpy().astype(np.int64), op.rows)
    index = torch.from_numpy(positions).to(values.device)
    return build(values[index], torch.from_numpy(new_offsets).to(offsets.device, offsets.dtype))


def concat(parts_in_order: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of all parts one after the other."""
    pairs = [parts(p) for p in parts_in_order]
    values = torch.cat([v for v, _ in pairs])
    shifted, base = [pairs[0][1][:1]], 0
    for _, offsets in pairs:
        shifted.append(offsets[1:] + base)
        base += int(offsets[-1])
    return build(values, torch.cat(shifted))


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same row lengths and same values; NaN equals NaN."""
    (values_a, offsets_a), (values_b, offsets_b) = parts(a), parts(b)
    return (
        values_a.shape == values_b.shape
        and values_a.dtype == values_b.dtype
        and torch.equal(offsets_a.long().cpu(), offsets_b.long().cpu())
        and same_dense(values_a, values_b)
    )


def same_dense(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values of two dense tensors of one shape; NaN equals NaN."""
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
