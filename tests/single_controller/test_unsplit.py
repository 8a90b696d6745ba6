"""Calls of modes that split batches, with arguments that are no batch or hide one."""

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from group_fixtures import group_on_both, ray_nightly
from quadriga.errors import DispatchError, LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, RankLayout, Worker, register, uneven_dispatch_mode

pytestmark = ray_nightly


class Rows(Worker):
    """Two ranks. Each method returns one row for each row that it receives."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", self.rank, True)
        self._register_rank_layout(RankLayout.of_rank(self.rank, dp=2))

    def _answer(self, data, times):
        rows = data if isinstance(data, int) else len(data)
        return DataProto.from_dict(tensors={"rank": torch.full((rows * times,), self.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def each(self, data=2, times=1):
        return self._answer(data, times)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data):
        return len(data)

    @register(dispatch_mode=uneven_dispatch_mode("train"))
    def by_mesh(self, data):
        return self._answer(data, 1)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def megatron(self, data):
        return self._answer(data, 1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, data):
        return function(self, data)


def answer(worker, data):
    return worker._answer(data, 1)


group = group_on_both(Rows)


def batch(count):
    return DataProto.from_dict(tensors={"row": torch.arange(count)})


HIDDEN = {
    "list with a DataProto": lambda group: [batch(2), batch(2)],
    "dict with a DataProto": lambda group: {"data": batch(2)},
    "tuple with a DataProto": lambda group: (1, [{"data": (batch(2),)}]),
    "list with a DataProtoFuture": lambda group: [group.each.submit(batch(2))],
    "dict with a TensorDict": lambda group: {"data": batch(2).batch},
    "one row of a batch": lambda group: batch(2)[0],
    "generator": lambda group: (batch(2) for _ in range(2)),
    "list_iterator": lambda group: iter([batch(2)]),
    "None": lambda group: None,
}


@pytest.mark.parametrize("mode", ["each", "by_mesh", "megatron", "apply"])
@pytest.mark.parametrize("kind", HIDDEN)
def test_what_every_rank_would_receive_whole_is_refused(group, mode, kind):
    function = (answer,) if mode == "apply" else ()
    expected = rf"Rows\.{mode}: expected a batch to split .*, got .*{kind}"
    with pytest.raises(DispatchError, match=expected):
        getattr(group, mode)(*function, HIDDEN[kind](group))


def test_a_batch_in_a_keyword_argument_is_named(group):
    with pytest.raises(DispatchError, match="got argument 'data' of type list"):
        group.each(times=2, data=[batch(2)])


def test_without_a_batch_every_rank_receives_the_values(group):
    assert group.each().batch["rank"].tolist() == [0, 0, 1, 1]
    assert group.each(1, 2).batch["rank"].tolist() == [0, 0, 1, 1]
    assert group.each(1, times=1).batch["rank"].tolist() == [0, 1]
    assert group.each([5, 6, 7]).batch["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert group.metric("four") == [4, 4]


def test_a_mode_of_uneven_parts_splits_any_number_of_rows(group):
    assert group.by_mesh(batch(1)).batch["rank"].tolist() == [0]
    pending = group.each.submit(batch(4), times=5).chunk(4)[0]
    for given in (batch(5), batch(5).batch, pending):
        assert group.by_mesh(given).batch["rank"].tolist() == [0, 0, 0, 1, 1]
    padded = DataProto.from_dict({"row": torch.arange(5)}, auto_padding=True)
    assert group.by_mesh(padded).batch["rank"].tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(LengthError, match="or register the method with uneven_dispatch_mode"):
        group.each(batch(5))


def test_a_lazily_stacked_tensordict_is_split(group):
    rows = [TensorDict({"row": torch.tensor(i)}) for i in range(4)]
    stacked = LazyStackedTensorDict.lazy_stack(rows)
    assert group.each(stacked).batch["rank"].tolist() == [0, 0, 1, 1]
    assert group.metric(stacked) == [2, 2]
