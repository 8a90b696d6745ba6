"""Mini-batches of a batch, and a batch from single rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from quadriga.errors import LengthError
from quadriga.protocol import values
from quadriga.protocol.item import DataProtoItem

if TYPE_CHECKING:
    from quadriga.protocol.dataproto import DataProto


def mini_batches(
    data: Any, size: int, epochs: int, seed: int | None, loader_kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    """`len(data) // size * epochs` mini-batches; checked here, drawn lazily."""
    if size < 1 or len(data) % size:
        raise LengthError(
            f"{len(data)} rows do not divide into mini-batches of {size}: "
            f"{len(data)} = {size} × {len(data) // max(size, 1)} + {len(data) % max(size, 1)}"
        )
    return _draw(data, size, epochs, seed, loader_kwargs)


def _draw(
    data: Any, size: int, epochs: int, seed: int | None, loader_kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    if len(data) == 0:
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        cast(Any, range(len(data))),
        batch_size=size,
        collate_fn=list,
        generator=generator,
        **loader_kwargs,
    )
    for _ in range(epochs):
        for rows in loader:
            yield data.select_idxs(rows)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """A batch from single rows. Rows of different shapes become a jagged tensor.

    Raises `LengthError` for an empty list. `meta_info` is that of the first row.
    """
    from quadriga.protocol.dataproto import DataProto

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
