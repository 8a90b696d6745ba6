"""Programs that add, replace and call dispatch and execute modes."""

from types import SimpleNamespace

import pytest
import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    MAGIC_ATTR,
    Dispatch,
    Execute,
    _check_dispatch_mode,
    _check_execute_mode,
    collect_all_to_all,
    collect_megatron_compute,
    collect_megatron_pp_as_dp_data_proto,
    dispatch_megatron_compute,
    dispatch_megatron_compute_data_proto,
    dispatch_megatron_pp_as_dp_data_proto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    update_dispatch_mode,
)

from quadriga.errors import DispatchError, UnknownNameError
from quadriga.single_controller import GroupLayout, RankLayout


@pytest.fixture(scope="module")
def group(start_for_module, mode_workers):
    return start_for_module(mode_workers.Modes)


def test_a_mode_written_into_the_registry(group, mode_workers):
    assert group.mine(["a", "b"]) == ["b", "a"]
    functions = DISPATCH_MODE_FN_REGISTRY[Dispatch.REVERSED]
    assert functions["dispatch_fn"] is mode_workers.reverse_dispatch
    assert Dispatch.REVERSED in list(DISPATCH_MODE_FN_REGISTRY)
    assert get_predefined_dispatch_fn(Dispatch.REVERSED)["collect_fn"] is collect_all_to_all


def test_a_registered_mode(group):
    assert group.summed(1) == 3


def test_a_mode_that_composes_functions_of_the_library(group):
    data = DataProto.from_dict({"a": torch.arange(3)}, auto_padding=True)
    assert group.composed(data).batch["a"].tolist() == [0, 1, 2]
    assert group.composed_later(data).get().batch["a"].tolist() == [0, 1, 2]


def test_a_replaced_mode(group):
    update_dispatch_mode(Dispatch.SUMMED, dispatch_one_to_all, collect_all_to_all)
    assert group.summed(1) == [1, 2]


def test_modes_are_an_enumeration():
    assert isinstance(Dispatch.ONE_TO_ALL, Dispatch)
    assert isinstance(Execute.ALL, Execute)
    assert not isinstance(Execute.ALL, Dispatch)
    assert not isinstance({}, Dispatch)
    assert isinstance({}, Dispatch | dict)
    assert isinstance(Dispatch.DP_COMPUTE, Dispatch | dict)
    assert Dispatch.ONE_TO_ALL in Dispatch
    assert "ONE_TO_ALL" in Dispatch
    assert Dispatch["ONE_TO_ALL"] is Dispatch.ONE_TO_ALL is Dispatch.from_name("one_to_all")
    assert "RANK_ZERO" in Execute.names()
    assert Execute.ALL in Execute.values() and Execute.ALL in list(Execute)
    assert len({mode.value for mode in Dispatch}) == len(Dispatch)


def test_a_mode_is_added_and_removed():
    mode = Dispatch.register("once")
    assert (mode.name, Dispatch.ONCE) == ("ONCE", mode)
    with pytest.raises((DispatchError, ValueError)):
        Dispatch.register("ONCE")
    with pytest.raises(DispatchError, match="ONCE"):
        get_predefined_dispatch_fn(mode)["dispatch_fn"](SimpleNamespace(world_size=1), 1)
    Dispatch.remove("once")
    assert Dispatch.from_name("once") is None
    with pytest.raises(UnknownNameError):
        Dispatch.ONCE  # noqa: B018


def test_the_functions_of_a_mode_are_called_with_a_group(group):
    functions = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    data = DataProto.from_dict({"a": torch.arange(4)})
    args, kwargs = functions["dispatch_fn"](group, data)
    assert ([part.batch["a"].tolist() for part in args[0]], kwargs) == ([[0, 1], [2, 3]], {})
    joined = functions["collect_fn"](group, args[0])
    assert joined.batch["a"].tolist() == [0, 1, 2, 3]
    later = functions["collect_fn"](group, [ray.put(part) for part in args[0]])
    assert later.get().batch["a"].tolist() == [0, 1, 2, 3]


def test_execute_functions():
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}
    half = Execute.from_name("LAST_HALF") or Execute.register("LAST_HALF")
    assert get_predefined_execute_fn(half) == {"execute_fn_name": "execute_last_half"}
    Execute.remove("LAST_HALF")


def megatron_group():
    layouts = [RankLayout.of_rank(rank, tp=2, dp=1, pp=2) for rank in range(4)]
    return SimpleNamespace(world_size=4, rank_layout=GroupLayout.of(layouts))


def test_megatron_functions():
    group = megatron_group()
    args, _ = dispatch_megatron_compute(group, ["x"])
    assert args == (["x"] * 4,)
    assert collect_megatron_compute(group, [0, 1, 2, 3]) == [2]  # tp 0 of the last stage
    data = DataProto.from_dict({"a": torch.arange(4)})
    (parts,), _ = dispatch_megatron_compute_data_proto(group, data)
    assert [len(part) for part in parts] == [4] * 4
    (parts,), _ = dispatch_megatron_pp_as_dp_data_proto(group, data)
    assert [part.batch["a"].tolist() for part in parts] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    joined = collect_megatron_pp_as_dp_data_proto(group, parts)
    assert joined.batch["a"].tolist() == [0, 1, 2, 3]


def test_the_record_of_a_method_is_a_dict(mode_workers):
    record = getattr(mode_workers.Modes.mine, MAGIC_ATTR)
    assert isinstance(record, dict)
    assert record["dispatch_mode"] == Dispatch.REVERSED
    assert (record["execute_mode"], record["blocking"]) == (Execute.ALL, True)
    assert MAGIC_ATTR == "attrs_3141562937"
    inline = getattr(mode_workers.Modes.composed_later, MAGIC_ATTR)
    assert inline["dispatch_mode"]["dispatch_fn"] is mode_workers.padded_dispatch
    assert inline["blocking"] is False
    assert hasattr(Worker.execute_with_func_generator, MAGIC_ATTR)


def test_modes_are_checked():
    _check_dispatch_mode(Dispatch.ONE_TO_ALL)
    _check_dispatch_mode({"dispatch_fn": max, "collect_fn": max})
    _check_execute_mode(Execute.ALL)
    with pytest.raises(DispatchError, match="collect_fn"):
        _check_dispatch_mode({"dispatch_fn": max})
    with pytest.raises(DispatchError, match="ONE_TO_ALL"):
        _check_dispatch_mode("ONE_TO_ALL")
    with pytest.raises(DispatchError, match="Execute"):
        _check_execute_mode(Dispatch.ONE_TO_ALL)
