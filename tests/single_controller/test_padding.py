"""Padding rows are removed from joined results, whatever a method does with its rows."""

import pickle

import pytest
import torch

from group_fixtures import local_group
from quadriga.errors import LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    RankLayout,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Rows(Worker):
    """Does with its rows what the caller says."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("pairs", self.rank // 2, self.rank % 2 == 1)
        self._register_rank_layout(RankLayout.of_rank(self.rank, pp=self.world_size))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def all_ranks(self, data, function):
        return function(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pairs"))
    def mesh(self, data, function):
        return function(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def stages(self, data, function):
        return function(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def keys(self, data):
        return sorted(data.non_tensor_batch), len(data)


@pytest.fixture(scope="module", params=[2, 8])
def group(request):
    return local_group(Rows, request.param)


def batch(n):
    return DataProto.from_dict(
        {"row": torch.arange(n)}, {"name": [str(i) for i in range(n)]}, auto_padding=True
    )


def renewed(data, rows):
    """A new batch that shares nothing with the received one."""
    return DataProto.from_dict({"row": data.batch["row"][rows or slice(None)]})


FUNCTIONS = {
    "same": (lambda data: data, lambda rows: rows),
    "repeat, interleaved": (
        lambda data: data.repeat(2, interleave=True),
        lambda rows: [row for row in rows for _ in range(2)],
    ),
    "filter": (
        lambda data: data[data.batch["row"] % 2 == 1],
        lambda rows: [row for row in rows if row % 2],
    ),
    "new batch": (lambda data: renewed(data, slice(None)), lambda rows: rows),
    "new batch, three rows for each": (
        lambda data: DataProto.from_dict({"row": data.batch["row"].repeat_interleave(3)}),
        lambda rows: [row for row in rows for _ in range(3)],
    ),
    "tensordict": (lambda data: data.to_tensordict(), lambda rows: rows),
}


@pytest.mark.parametrize("method", ["all_ranks", "mesh", "stages"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("n", [1, 5, 16])
def test_results_have_no_padding(group, method, name, n):
    function, expected = FUNCTIONS[name]
    result = getattr(group, method)(batch(n), function)
    values = result.batch["row"] if isinstance(result, DataProto) else result["row"]
    assert values.tolist() == expected(list(range(n)))
    keys = set(result.non_tensor_batch) if isinstance(result, DataProto) else set(result.keys())
    assert keys <= {"name", "row", "_auto_padding"}


def test_a_new_batch_whose_rows_cannot_be_assigned_is_refused():
    group = local_group(Rows)
    result = group.all_ranks(batch(5), lambda data: data.repeat(2, interleave=False))
    assert result.batch["row"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    with pytest.raises(
        LengthError,
        match=r"Rows\.all_ranks returned 2 rows for part 1.*3 rows.*the last 1.*'__padding__'",
    ):
        group.all_ranks(batch(5), lambda data: renewed(data, slice(0, 2)))
    # Rank 0 has no padding: it may return any number of rows.
    kept = group.all_ranks(
        batch(5), lambda data: renewed(data, slice(0, 2) if data.batch["row"][0] == 0 else None)
    )
    assert kept.batch["row"].tolist() == [0, 1, 3, 4]


def test_methods_may_read_which_rows_are_padding(group):
    n, ranks = 5, group.world_size
    size = -(-n // ranks)
    assert group.keys(batch(n)) == [(["__padding__", "name"], size)] * ranks
    assert group.keys(batch(2 * ranks)) == [(["name"], 2)] * ranks
    data = batch(n)
    group.keys(data)
    assert list(data.non_tensor_batch) == ["name"]  # the caller's batch is not changed


def test_a_padded_part_that_is_padded_again():
    """A worker that received padding calls a group of its own."""
    group, inner = local_group(Rows), local_group(Rows)
    result = group.all_ranks(
        batch(5), lambda data: inner.all_ranks(data, lambda part: part.repeat(2, interleave=False))
    )
    assert result.batch["row"].tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 3, 4]


def test_a_future_of_a_padded_call_is_pickled_with_its_padding(group):
    future = group.all_ranks.submit(batch(5), lambda data: data.repeat(2))
    restored = pickle.loads(pickle.dumps(future)).get()
    assert restored.batch["row"].tolist() == [row for row in range(5) for _ in range(2)]
