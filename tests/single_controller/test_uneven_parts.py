"""Parts of unequal length, for modes that allow them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from group_fixtures import Starter, ray_nightly
from quadriga.errors import LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register, uneven_dispatch_mode

pytestmark = ray_nightly


class Rows(Worker):
    """Four ranks with tp=2: two data-parallel ranks."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", self.rank // 2, self.rank % 2 == 0)

    def _answer(self, data):
        rank = torch.full((len(data),), self.rank)
        if isinstance(data, TensorDict):
            return TensorDict({"row": data["row"], "rank": rank}, batch_size=[len(data)])
        return DataProto.from_dict(tensors={"row": data.batch["row"], "rank": rank})

    @register(dispatch_mode=uneven_dispatch_mode())
    def each(self, data, scale=1):
        return self._answer(data)

    @register(dispatch_mode=uneven_dispatch_mode("train"))
    def by_mesh(self, data):
        return self._answer(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def even(self, data):
        return self._answer(data)


@pytest.fixture(scope="module")
def rows_group(backend):

    starter = Starter(backend)
    yield starter(Rows, 4)
    starter.end()


def batch(count, **options):
    return DataProto.from_dict(tensors={"row": torch.arange(count)}, **options)


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(8, [0, 0, 1, 1, 2, 2, 3, 3]), (5, [0, 0, 1, 2, 3]), (7, [0, 0, 1, 1, 2, 2, 3]), (2, [0, 1])],
)
def test_rows_are_split_over_all_ranks(rows_group, count, ranks):
    result = rows_group.each(batch(count), scale=2)
    assert result.batch["row"].tolist() == list(range(count))
    assert result.batch["rank"].tolist() == ranks


def test_rows_are_split_by_the_ranks_of_a_mesh(rows_group):
    result = rows_group.by_mesh(batch(5))
    assert result.batch["row"].tolist() == [0, 1, 2, 3, 4]
    assert result.batch["rank"].tolist() == [0, 0, 0, 2, 2]


def test_a_future_is_split_where_its_rows_arrive(rows_group):
    first = rows_group.each.submit(batch(5))
    second = rows_group.by_mesh.submit(first)
    assert second.get().batch["rank"].tolist() == [0, 0, 0, 2, 2]
    assert rows_group.each(second).batch["rank"].tolist() == [0, 0, 1, 2, 3]  # it has arrived


def test_other_modes_still_need_rows_that_divide(rows_group):
    with pytest.raises(LengthError, match="or register the method with uneven_dispatch_mode"):
        rows_group.even(batch(5))


def test_a_batch_with_padding_is_padded(rows_group):
    result = rows_group.each(batch(5, auto_padding=True))
    assert result.batch["row"].tolist() == [0, 1, 2, 3, 4]
    assert result.batch["rank"].tolist() == [0, 0, 1, 1, 2]  # parts of 2 rows, 3 rows of padding
