"""A batch from single rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quadriga.errors import LengthError
from quadriga.protocol.dataproto import DataProto
from quadriga.protocol.item import DataProtoItem
from quadriga.protocol.values import operations as values


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """A batch from single rows. Rows of different shapes become a jagged tensor.

    Raises `LengthError` for an empty list. `meta_info` is that of the first row.
    """
    if not items:
        raise LengthError("collate_fn needs at least one row; got none")
    first = items[0]
    tensors = {}
    if first.batch is not None:
        for key in first.batch.keys():  # noqa: SIM118
            tensors[key] = _stack([item.batch[key] for item in items])
    arrays = {
        key: values.object_array([item.non_tensor_batch[key] for item in items])
        for key in first.non_tensor_batch
    }
    return DataProto.from_dict(tensors, arrays, dict(first.meta_info))


def _stack(rows: Sequence[Any]) -> Any:
    if len({tuple(row.shape) for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)
