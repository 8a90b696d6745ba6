"""Mesh dispatch and the MEGATRON family, against results written out by hand."""

import pickle

import pytest
import torch

from group_fixtures import local_group
from quadriga.errors import LengthError, MeshError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    GroupLayout,
    RankLayout,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Meshed(Worker):
    """Trains at dp=4 tp=2 and generates at dp=2 tp=4, on the same eight ranks."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("train", self.rank // 2, self.rank % 2 == 0)
        self._register_dispatch_collect_info("infer", self.rank // 4, self.rank % 4 == 3)
        self.queries = 0

    def _query_mesh(self, mesh_name):
        self.queries += 1
        return super()._query_mesh(mesh_name)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def train(self, data, scale=1):
        data.batch["a"] = data.batch["a"] * scale
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("infer"))
    def infer(self, data):
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("nowhere"))
    def lost(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self):
        return self.queries


def batch(n, **options):
    return DataProto.from_dict(tensors={"a": torch.arange(n)}, **options)


def test_two_meshes_in_one_worker():
    group = local_group(Meshed, 8)
    trained = group.train(batch(8), scale=10)
    assert trained.batch["a"].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
    assert trained.batch["rank"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    inferred = group.infer(batch(8))
    assert inferred.batch["a"].tolist() == list(range(8))
    assert inferred.batch["rank"].tolist() == [3, 3, 3, 3, 7, 7, 7, 7]
    assert group.dispatch_info("train") == [0, 0, 1, 1, 2, 2, 3, 3]
    # A result made in four parts is an argument in two.
    assert group.infer(group.train.submit(batch(8), scale=2)).batch["a"].tolist() == [
        *range(0, 16, 2)
    ]
    group.train(batch(8))
    assert group.count() == [2] * 8  # once per mesh


def test_a_pickled_future_of_a_mesh_call_is_joined_without_the_group():
    group = local_group(Meshed, 8)
    future = group.train.submit(batch(8))
    restored = pickle.loads(pickle.dumps(future))
    assert restored.get().batch["rank"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]


def test_ranks_with_the_same_part_receive_the_same_object():
    """The parts handed to the backend: one object per data-parallel rank."""
    group = local_group(Meshed, 8)
    group.train(batch(8))
    sent = []
    submit = group._ranks.backend.submit
    group._ranks.backend.submit = lambda ranks, targets, calls, timeout: (
        sent.extend(calls) or submit(ranks, targets, calls, timeout)
    )
    group.train(batch(8))
    assert [sent[0] is sent[1], sent[1] is sent[2], sent[2] is sent[3]] == [True, False, True]
    assert len({id(call) for call in sent}) == 4


def test_unknown_and_repeated_meshes_are_refused():
    group = local_group(Meshed, 8)
    with pytest.raises(MeshError, match=r"has not registered the mesh 'nowhere'.*infer.*train"):
        group.lost(batch(8))
    worker = group._ranks.handles[0].native.host.workers["Meshed"]
    with pytest.raises(MeshError, match="'train' is registered already"):
        worker._register_dispatch_collect_info("train", 0, True)


class Odd(Worker):
    def __init__(self, dp_ranks, collects):
        super().__init__()
        self._register_dispatch_collect_info("m", dp_ranks[self.rank], collects[self.rank])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("m"))
    def same(self, data):
        return data


@pytest.mark.parametrize(
    ("dp_ranks", "collects", "words"),
    [
        ([0, 2], [True, True], r"must cover 0\.\.2"),
        ([0, 0], [True, True], "collected from one rank"),
        ([0, 1], [False, False], "at least one must be"),
    ],
)
def test_inconsistent_meshes_are_refused(dp_ranks, collects, words):
    with pytest.raises(MeshError, match=words):
        local_group(Odd, 2, dp_ranks, collects).same(batch(2))


def test_registered_meshes_as_dicts():
    group = local_group(Meshed, 8)
    assert group.get_dispatch_collect()[3] == {
        "dispatch_dp_rank": {"train": 1, "infer": 0},
        "collect_dp_rank": {"train": False, "infer": True},
    }
    assert group._query_dispatch_info("infer") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert group._query_collect_info("infer") == [False, False, False, True] * 2
    group.set_dispatch_collect("copy", {"copy": 0}, {"copy": True})
    assert group.get_dispatch_collect()[3]["dispatch_dp_rank"]["copy"] == 0


class Megatron(Worker):
    def __init__(self, tp, cp, dp, pp):
        super().__init__()
        self._register_rank_layout(RankLayout.of_rank(self.rank, tp, cp, dp, pp))

    lists = register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)(lambda self, x: (self.rank, x))
    stages = register(dispatch_mode=Dispatch.MEGATRON_PP_ONLY)(lambda self, x: (self.rank, x))
    stage_lists = register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP)(lambda self, x: (self.rank, x))

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def proto(self, data):
        return self._mark(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def stage_proto(self, data):
        return self._mark(data)

    def _mark(self, data):
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data


def test_megatron_modes_on_tp2_dp2_pp2():
    group = local_group(Megatron, 8, 2, 1, 2, 2)
    # Ranks 0-3 are the first stage, 4-7 the last; within a stage tp is inner.
    assert group.lists(["a", "b"]) == [(4, "a"), (6, "b")]
    assert group.proto(batch(4)).batch["rank"].tolist() == [4, 4, 6, 6]
    assert group.proto(batch(4)).batch["a"].tolist() == [0, 1, 2, 3]
    assert group.stage_lists([*"abcd"]) == [(0, "a"), (4, "b"), (2, "c"), (6, "d")]
    assert group.stage_proto(batch(4)).batch["rank"].tolist() == [0, 4, 2, 6]
    assert group.stage_proto(batch(4)).batch["a"].tolist() == [0, 1, 2, 3]
    assert group.stages("x") == [(0, "x"), (4, "x")]


def test_megatron_modes_with_context_parallelism():
    group = local_group(Megatron, 4, 1, 2, 2, 1)
    assert group.lists(["a", "b"]) == [(0, "a"), (2, "b")]
    with pytest.raises(LengthError, match="has 4 entries for 2 parts"):
        group.lists([1, 2, 3, 4])


def test_inconsistent_layouts_are_refused():
    with pytest.raises(MeshError, match="tp=2 × cp=1 × dp=2 × pp=1 = 4 ranks"):
        RankLayout.of_rank(4, tp=2, dp=2)
    with pytest.raises(MeshError, match="tp_rank must lie"):
        RankLayout(2, 0, 0, 0, tp_size=2)
    with pytest.raises(MeshError, match="different layouts"):
        GroupLayout.of([RankLayout.of_rank(0, tp=2), RankLayout.of_rank(1, dp=2)])
    with pytest.raises(MeshError, match="with 1 different"):
        GroupLayout.of([RankLayout.of_rank(0, tp=2)] * 2)


def test_a_megatron_mode_without_a_rank_layout_is_refused():
    class Plain(Worker):
        @register(dispatch_mode=Dispatch.MEGATRON_PP_ONLY)
        def stages(self):
            return 1

    with pytest.raises(MeshError, match="has no rank layout"):
        local_group(Plain, 2).stages()
