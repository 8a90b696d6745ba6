"""Small fields of a call are sent in the message; if they are large together, they are stored."""

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto
from quadriga.protocol.boundary import pack_argument, unpack_argument
from quadriga.protocol.storage import InProcessStore, Origin
from quadriga.protocol.values import same

RANK = Origin("actor", 0, "make")


class CountingStore(InProcessStore):
    """The store of other processes; `objects` has the sizes of the fields of each object."""

    in_process = False

    def __init__(self) -> None:
        self.objects: list[list[int]] = []

    def put_many(self, values):
        self.objects.append([nbytes for _, nbytes in values])
        return super().put_many(values)


def batch(columns: int) -> DataProto:
    """Return four rows with three fields of `columns` float32 values, and a column of objects."""
    fields = {f"x{i}": torch.randn(4, columns) for i in range(2)}
    arrays = {"a": np.arange(4 * columns, dtype=np.float32).reshape(4, -1)}
    return DataProto.from_dict(fields, non_tensors={**arrays, "o": [{"k": 1}, 2, "c", None]})


def is_equal(a: DataProto, b: DataProto) -> bool:
    return all(same(a.batch[key], b.batch[key]) for key in ("x0", "x1")) and all(
        same(a.non_tensor_batch[key], b.non_tensor_batch[key]) for key in a.non_tensor_batch
    )


@pytest.mark.parametrize(
    "columns, objects",
    [(2000, []), (2200, [[35_200] * 3]), (4000, [[64_000] * 3])],
    ids=["96 kB", "105.6 kB, more than 100 KiB", "192 kB"],
)
def test_small_fields_that_are_large_together_are_one_object(columns, objects):
    data, store = batch(columns), CountingStore()
    message = pack_argument(data, store)
    assert store.objects == objects
    assert is_equal(unpack_argument(message), data)
