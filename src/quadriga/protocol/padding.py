"""Padding: rows added so that a batch divides, and taken away again."""

from __future__ import annotations

import numpy as np

from quadriga.errors import LengthError
from quadriga.protocol.dataproto import DataProto
from quadriga.protocol.values.row_selection import Span, Take


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """`(padded, pad_size)`: rows from the front are repeated until the length divides.

    An empty batch stays as it is: there is no row to repeat.
    """
    if size_divisor < 1:
        raise LengthError(f"a batch is padded to a multiple of at least 1; got {size_divisor}")
    length = len(data)
    pad_size = -length % size_divisor
    if length == 0 or pad_size == 0:
        return data, 0
    rows = np.arange(length + pad_size, dtype=np.int64) % length
    return data.take_rows(Take(rows)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise LengthError(f"cannot take {pad_size} padding rows from a batch of {len(data)} rows")
    return data.take_rows(Span(0, len(data) - pad_size)) if pad_size else data
