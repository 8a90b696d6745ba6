"""Programs that use parts of verl's controller: of dispatch functions, workers, fused classes."""

import os
import pickle
from unittest import mock

import pytest
import torch
import verl.single_controller.base.decorator as modes
import verl.single_controller.ray.base as groups
from tensordict import TensorDict
from verl import DataProto
from verl.protocol import DataProtoFuture
from verl.single_controller.base.megatron.worker import MegatronWorker
from verl.single_controller.base.worker import Worker, WorkerMeta
from verl.utils.py_functional import DynamicEnum

from quadriga.errors import ConfigError, DispatchError, FieldError, LengthError, PlacementError


def batch(*rows, **meta):
    return DataProto.from_dict({"x": torch.tensor(rows)}, meta_info=meta)


def xs(parts):
    tables = [part if isinstance(part, TensorDict) else part.batch for part in parts]
    return [table["x"].tolist() for table in tables]


TABLE, PADDED = TensorDict({"x": torch.tensor([5, 6])}, [2]), {"_verl_auto_padding": True}


def test_the_parts_of_dispatch_functions():
    split, padding = modes._split_args_kwargs_data_proto, modes._padding_size_key
    args, kwargs = split(2, batch(1, 2, 3, 4), other=TABLE)
    assert (xs(args[0]), xs(kwargs["other"])) == ([[1, 2], [3, 4]], [[5], [6]])
    split = modes._split_args_kwargs_data_proto_with_auto_padding
    args, kwargs = split(2, batch(1, 2, 3, **PADDED))
    assert (xs(args[0]), kwargs) == ([[1, 2], [3, 3]], {padding: 1})
    args, kwargs = split(2, k=batch(1, 2))
    assert (args, list(kwargs), xs(kwargs["k"])) == ([], ["k"], [[1], [2]])
    assert xs([modes._concat_data_proto_or_future([batch(1), batch(2)])]) == [[1, 2]]
    assert xs([modes._concat_data_proto_or_future([TABLE, TABLE])]) == [[5, 6, 5, 6]]


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("_split_args_kwargs_data_proto", (2, batch(1, 2, 3)), LengthError),
        ("_split_args_kwargs_data_proto", (2, [1, 2]), FieldError),
        ("_split_args_kwargs_data_proto_with_auto_padding",
         (2, batch(1, **PADDED), batch(1, 2, **PADDED)), LengthError),
        ("_concat_data_proto_or_future", ([batch(1), TABLE],), FieldError),
        ("_concat_data_proto_or_future", ([],), FieldError),
        ("DataProtoFuture", ([batch(1)],), FieldError),
        ("DataProtoFuture", ([],), FieldError),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused(name, args, error):
    with pytest.raises(error):
        getattr(modes, name)(*args)


def test_futures_of_references_and_a_register_center(cluster):
    import ray
    from verl.single_controller.base.register_center import ray as centers

    refs = [ray.put(batch(1, 2)), ray.put(batch(3, 4))]
    future = DataProtoFuture(refs)
    assert xs([future.get()]) == [[1, 2, 3, 4]]
    joined = modes._concat_data_proto_or_future([future, DataProtoFuture(refs)])
    assert xs([joined.get()]) == [[1, 2, 3, 4] * 2]
    args, kwargs = modes._materialize_futures(7, future, k=future)
    assert (args[0], xs([args[1], kwargs["k"]])) == (7, [[1, 2, 3, 4]] * 2)
    args, _ = modes._split_args_kwargs_data_proto(2, future)
    assert xs(part.get() for part in args[0]) == [[1, 2], [3, 4]]
    center = centers.create_worker_group_register_center("own_center", {"MASTER_PORT": "1"})
    ray.get(center.set_worker_info.remote(1, "node"))
    found = ray.get_actor("own_center")
    known = ray.get([found.get_rank_zero_info.remote(), found.get_worker_info.remote()])
    assert known == [{"MASTER_PORT": "1"}, {1: "node"}]
    ray.kill(center)
    assert groups._unwrap_ray_remote(ray.remote(Inner)) is groups._unwrap_ray_remote(Inner) is Inner


class Inner(Worker):
    @modes.register(dispatch_mode=modes.Dispatch.ONE_TO_ALL, blocking=False)
    def add(self, x):
        return x + 2

    @modes.register(dispatch_mode=modes.Dispatch.DIRECT_ROLLOUT_METHOD)
    def ask(self, text):
        return text.upper()

    def plain(self):
        """Is not registered, so it is not bound."""


def test_methods_of_inner_workers_are_bound():
    base_of = groups._determine_fsdp_megatron_base_class

    class Outer(base_of([Inner.__mro__])):
        def __init__(self):
            self.worker_dict = {"rollout": Inner()}

    groups._bind_workers_method_to_parent(Outer, "rollout", Inner)
    assert (Outer().rollout_add(x=1), Outer().ask("a")) == (3, "A")
    assert not hasattr(Outer, "rollout_plain") and not hasattr(Outer, "rollout_ask")
    assert vars(Outer.rollout_add)[modes.MAGIC_ATTR] == vars(Inner.add)[modes.MAGIC_ATTR]
    with pytest.raises(DispatchError, match="has a method 'ask' already"):
        groups._bind_workers_method_to_parent(Outer, "rollout", Inner)
    assert (Outer.__base__, base_of([MegatronWorker.__mro__])) == (Worker, MegatronWorker)
    with pytest.raises(ValueError, match="derive the class from Worker"):
        base_of([int.__mro__])
    fused = groups.create_colocated_worker_raw_cls({"a": groups.RayClassWithInitArgs(Inner)})
    assert fused.__name__ == f"{groups.FusedWorkerCLSName}_a"
    assert list(getattr(fused(), Worker.fused_worker_attr_name)) == ["a"]


@mock.patch.dict(os.environ, {"MASTER_ADDR": "[::1]"})
def test_a_worker_is_told_its_place():
    worker = Worker()
    assert os.environ["REDIS_STORE_SERVER_HOST"] == "::1"
    store = {"_rank": 1, "_world_size": 2, "_master_addr": "10.0.0.7", "_master_port": 5}
    worker._configure_with_meta(WorkerMeta(store))
    assert (worker.rank, worker.world_size, worker.master_port) == (1, 2, "5")
    assert (os.environ["RANK"], os.environ["REDIS_STORE_SERVER_HOST"]) == ("1", "10.0.0.7")
    with pytest.raises(DispatchError, match="expects a WorkerMeta, got"):
        worker._configure_with_meta(store)


def test_pools_are_checked_before_they_are_created(cluster):
    class Small(groups.ResourcePoolManager):
        def _check_resource_available(self):
            """The nodes have no accelerators, which `get_placement_groups` would report."""

    spec = {"a": [1], "b": [2, 1]}
    manager, small = (cls(spec, {"judge": "b"}) for cls in (groups.ResourcePoolManager, Small))
    for check in (manager._check_resource_available, manager.create_resource_pool):
        with pytest.raises(PlacementError):
            check()
    small.create_resource_pool()
    assert (manager.resource_pool_dict, small.get_resource_pool("judge").store) == ({}, [2, 1])


class Own(DynamicEnum):
    """An enumeration of a program."""


def test_an_enumeration_that_grows():
    first, second = Own.register("first"), Own.register("SECOND")
    assert (Own.FIRST, Own["SECOND"], Own.from_name("third")) == (first, second, None)
    assert (Own.names(), Own.values(), list(Own)) == (["FIRST", "SECOND"], *[[first, second]] * 2)
    assert (first.value, second.value, repr(second)) == (0, 1, "<Own.SECOND: 1>")
    assert "FIRST" in Own and second in Own and "first" not in Own
    assert pickle.loads(pickle.dumps(second)) is Own.from_name("second") is second
    with pytest.raises(ConfigError, match=r"Own\.FIRST is registered already"):
        Own.register("First")
    assert Own.remove("first") is first and not hasattr(Own, "FIRST")
    assert type("Other", (DynamicEnum,), {}).names() == []
