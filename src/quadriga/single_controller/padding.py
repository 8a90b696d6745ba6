"""Padding of a batch that does not divide, and its removal from the results.

Example: 5 rows on 2 ranks. One row is added, and every part has the field `__padding__`:

    part 0   rows 0 1 2     __padding__  F F F
    part 1   rows 3 4 0     __padding__  F F T     row 0 is the padding

A method may repeat, filter or reorder its rows. If its result still has the field, the rows that it
marks are removed: `repeat(2, interleave=False)` of part 1 is 3 4 0 3 4 0, marked F F T F F T, of
which 3 4 3 4 remain. A method that returns a new batch without the field must return the f rows
made from one received row next to each other, in the order of the received rows: of 3 3 4 4 0 0
(f = 2), the last 2 rows are removed. The result of a part without padding may have any rows. A
result whose rows are no rows of the batch, such as a report, has the field with False: all remain.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from quadriga.errors import LengthError
from quadriga.protocol import DataProto, pad_dataproto_to_divisor
from quadriga.protocol.dataproto import PADDING_FIELD
from quadriga.protocol.tensordicts import TensorDict

BatchT = TypeVar("BatchT", DataProto, TensorDict)


@dataclass(frozen=True)
class Padding:
    """The padding of one call, the same for all its padded batches."""

    rows: int
    """Rows of a batch before the padding."""
    parts: int
    field: str
    """The field that marks padding, `PADDING_FIELD` with underscores if the batch has it."""

    @property
    def part_rows(self) -> int:
        """Rows of each part."""
        return -(-self.rows // self.parts)

    def in_part(self, part: int) -> int:
        """Return how many rows of a part are padding."""
        # 5 rows in 4 parts of 2: 0, 0, 1, 2
        real = min(max(self.rows - part * self.part_rows, 0), self.part_rows)
        return self.part_rows - real


def add_padding(memo: dict[str, object], where: str, data: DataProto, parts: int) -> DataProto:
    """Return a batch that divides into `parts`, and record the padding in the `memo` of the call.

    `where`: which argument of which method it is, for messages. Raises `LengthError` if another
    batch of the call has padding and another length.
    """
    field = PADDING_FIELD
    while field in data.non_tensor_batch:  # the caller is itself a worker that received padding
        field += "_"
    padding = Padding(len(data), parts, field)
    seen = memo.setdefault("padding", padding)
    if isinstance(seen, Padding) and seen.rows != padding.rows:
        raise LengthError(
            f"{where} has {padding.rows} rows and needs padding for {parts} parts, "
            f"another batch of the same call has {seen.rows} rows. Padded batches of one call must "
            "have the same length."
        )
    padded, added = pad_dataproto_to_divisor(data, parts)
    padded.non_tensor_batch[field] = np.arange(len(padded)) >= len(padded) - added
    return padded


def remove_padding(method: str, padding: Padding, part: int, result: BatchT) -> BatchT:
    """Return the result of one part without the rows that were made from padding.

    Raises `LengthError` if it does not show which rows these are.
    """
    result, marked = _without_field(result, padding.field)
    padded = padding.in_part(part)
    kept: BatchT = result
    if marked is not None:
        kept = result[torch.from_numpy(~marked)]
    elif padded and len(result) % padding.part_rows:
        raise LengthError(
            f"{method} returned {len(result)} rows for part {part}, which had "
            f"{padding.part_rows} rows, the last {padded} of them padding. It is not known which "
            f"rows were made from padding. Keep the field {padding.field!r} of the received batch "
            "in the result, or pass a batch that divides."
        )
    elif padded:
        kept = result[: len(result) - len(result) // padding.part_rows * padded]
    return kept


def _without_field(result: BatchT, field: str) -> tuple[BatchT, np.ndarray | None]:
    """Remove the field that marks padding. Return the batch and the field's values."""
    if isinstance(result, TensorDict):
        if field not in result:
            return result, None
        values = result.get(field)
        return result.exclude(field), np.array(values.tolist(), dtype=bool).reshape(len(result))
    if field not in result.non_tensor_batch:
        return result, None
    marked = np.asarray(result.non_tensor_batch[field], dtype=bool)
    rest = [name for name in result.non_tensor_batch if name != field]
    return result.select(non_tensor_batch_keys=rest), marked
