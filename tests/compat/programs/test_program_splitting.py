"""How the calls of verl's groups split arguments: only lists with one entry per rank are split."""

import pytest
import ray
import torch
from split_workers import UNCHANGED, Splits
from verl import DataProto
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    _check_dispatch_mode,
    dispatch_all_to_all,
    register,
)

from quadriga import single_controller
from quadriga.errors import DispatchError


@pytest.fixture(scope="module")
def group(start_for_module):
    return start_for_module(Splits)


def batch(rows, **meta):
    return DataProto.from_dict({"a": torch.arange(rows)}, meta_info=meta)


def test_only_lists_are_split_by_all_to_all(group):
    assert group.default([1, 2]) == [1, 2]
    assert group.default((1, 2)) == [(1, 2), (1, 2)]
    assert ray.get(group.default_later((1, 2))) == [(1, 2), (1, 2)]
    assert ray.get(group.default_later([1, 2])) == [1, 2]
    assert ray.get(group.default_later(3)) == [3, 3]
    assert group.each([1, 2]) == [1, 2]
    assert group.each((1, 2)) == [(1, 2), (1, 2)]
    assert dispatch_all_to_all(group, (1, 2), k=3) == (((1, 2),), {"k": 3})


@pytest.mark.parametrize("name", ["unchanged", "unchanged_later"])
def test_unchanged_arguments_are_split_only_if_all_are_lists_of_one_entry_per_rank(group, name):
    def received(*args, **kwargs):
        result = getattr(group, name)(*args, **kwargs)
        return ray.get(result) if name.endswith("later") else result

    assert received(3) == [((3,), {})] * 2
    assert received([3, 4], k=[5, 6]) == [((3,), {"k": 5}), ((4,), {"k": 6})]
    assert received([3, 4], k=5) == [(([3, 4],), {"k": 5})] * 2
    assert received([3, 4, 5]) == [(([3, 4, 5],), {})] * 2
    assert received((3, 4)) == [(((3, 4),), {})] * 2
    assert received() == [((), {})] * 2
    whole = received(batch(2))
    assert [args[0].batch["a"].tolist() for args, _ in whole] == [[0, 1], [0, 1]]


def test_rank_zero_receives_what_the_dispatch_function_returned(group):
    assert group.first(4) == (0, 4)
    assert group.first([4, 5]) == (0, [4, 5])
    assert group.first([4]) == (0, [4])
    assert ray.get(group.first_later([4, 5])) == (0, [4, 5])
    assert group.first(batch(2))[1].batch["a"].tolist() == [0, 1]
    assert group.first_replicated(4) == [4, 4]
    assert group.replicated(4) == [4, 4]


def test_a_dispatch_function_that_returns_no_pair_is_named(group, monkeypatch):
    monkeypatch.setitem(UNCHANGED, "dispatch_fn", lambda worker_group, x: x)

    class Wrong(Splits):
        @register(dispatch_mode=UNCHANGED)
        def default(self, x):
            return x

    wrong = type(group).from_detached(
        worker_handles=group.workers, ray_cls_with_init=type(group.ray_cls_with_init)(Wrong)
    )
    with pytest.raises(DispatchError, match=r"default: a dispatch function returns \(args, kwargs"):
        wrong.default(3)


@pytest.mark.parametrize("name", ["rows", "by_mesh", "applied"])
def test_the_batch_that_a_reference_names_is_split(group, name):
    function = (take_two,) if name == "applied" else ()
    result = getattr(group, name)(*function, ray.put(batch(4)))
    assert result.batch["a"].tolist() == [0, 1, 2, 3]


def take_two(worker, data):
    assert len(data) == 2
    return data


def test_references_in_other_calls_that_split(group):
    ref = ray.put(batch(4))
    assert group.rows_later(ref).get().batch["a"].tolist() == [0, 1, 2, 3]
    assert group.counted(ref) == group.composed(ref) == [2, 2]
    assert group.counted(group.execute_rank_zero_async("rows", ref)) == [2, 2]
    assert group.default(ref)[1].batch["a"].tolist() == [0, 1, 2, 3]  # no batch is split here


def test_the_other_object_that_a_reference_names_is_sent_whole(group):
    assert group.scaled(batch(2), ray.put(3)).batch["a"].tolist() == [0, 3]
    assert group.scaled(batch(2), scale=ray.put(5)).batch["a"].tolist() == [0, 5]


@pytest.mark.parametrize(
    "given",
    [
        lambda group: [batch(2), batch(2)],
        lambda group: [group.rows_later(batch(2))],
        lambda group: [ray.put(batch(2))],
    ],
)
@pytest.mark.parametrize("name", ["rows", "rows_later", "counted", "by_mesh", "composed"])
def test_what_every_rank_would_receive_whole_is_refused(group, name, given):
    with pytest.raises(DispatchError, match="expected a batch to split"):
        getattr(group, name)(given(group))


def test_the_literal_key_of_padding_in_meta_info(group):
    padded = group.rows(batch(3, _verl_auto_padding=True))
    assert padded.batch["a"].tolist() == [0, 1, 2]
    assert padded.meta_info["_verl_auto_padding"] is True


def test_other_keys_of_a_dict_of_functions_are_not_read():
    _check_dispatch_mode(UNCHANGED)
    mode = Dispatch.register("WITH_NOTE")
    try:
        DISPATCH_MODE_FN_REGISTRY[mode] = UNCHANGED
        assert set(DISPATCH_MODE_FN_REGISTRY[mode]) == {"dispatch_fn", "collect_fn"}
    finally:
        Dispatch.remove("WITH_NOTE")
    with pytest.raises(DispatchError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": len, "note": ""})
    with pytest.raises(DispatchError, match="exactly the keys"):
        single_controller.register(dispatch_mode=UNCHANGED)


def test_a_class_method_is_called_through_a_worker(group):
    assert [ray.get(worker.class_name.remote("!")) for worker in group.workers] == ["Splits!"] * 2
