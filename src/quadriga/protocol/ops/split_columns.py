"""Columns cut into more rows: each row's `[M, ...]` into `n` rows of `[M / n, ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as batches
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.values import jagged
from quadriga.protocol.values.row_selection import Take


def unfold_column_chunks(contents: Contents, n_split: int, split_keys: Sequence[str]) -> Contents:
    """Keys in `split_keys` cut along dimension 1, rows of all others repeated (by reference where
    they lie elsewhere).

    Raises `FieldError` for an unknown key, `LengthError` where dimension 1 does not divide.
    """
    if n_split < 1:
        raise LengthError(f"columns are cut into at least 1 part; got {n_split}")
    batch, arrays, meta = contents
    halves = (batches.tensor_columns(batch), batches.array_columns(arrays))
    known = [key for half in halves for key in half]
    for key in split_keys:
        if key not in known:
            raise batches.missing(key, known, "the batch")
    length = contents.rows
    op = Take(np.repeat(np.arange(length, dtype=np.int64), n_split))
    batches.prefetch(batch, arrays, split_keys)
    composed = columns.Composed()
    tensors, objects = (
        columns.take({k: v for k, v in half.items() if k not in split_keys}, op, composed)
        | {k: _cut(k, columns.local(v), n_split) for k, v in half.items() if k in split_keys}
        for half in halves
    )
    tensors, objects = (
        {key: cut[key] for key in half}
        for half, cut in zip(halves, (tensors, objects), strict=True)
    )
    new_batch = None if batch is None else batches.make_batch(batch, tensors, len(op))
    return Contents(new_batch, batches.make_arrays(objects), dict(meta))


def _cut(key: str, value: Any, n_split: int) -> Any:
    if isinstance(value, TensorDictBase):
        raise FieldError(f"field '{key}' is a nested TensorDict and has no columns", field=key)
    if jagged.is_jagged(value):
        return _cut_jagged(key, value, n_split)
    if len(value.shape) < 2 or value.shape[1] % n_split:
        raise LengthError(
            f"field '{key}' with shape {list(value.shape)} has no dimension 1 that divides into "
            f"{n_split} columns",
            field=key,
        )
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _cut_jagged(key: str, value: Any, n_split: int) -> Any:
    """The same values; more offsets."""
    values, offsets = jagged.parts(value)
    lengths = offsets.diff()
    odd = torch.nonzero(lengths % n_split).flatten().tolist()
    if odd:
        raise LengthError(
            f"row {odd[0]} of jagged field '{key}' has {int(lengths[odd[0]])} columns, which do "
            f"not divide into {n_split}",
            field=key,
        )
    steps = torch.arange(n_split, device=offsets.device)
    starts = offsets[:-1, None] + (lengths // n_split)[:, None] * steps
    return jagged.build(values, torch.cat([starts.flatten(), offsets[-1:]]).to(offsets.dtype))
