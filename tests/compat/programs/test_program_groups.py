"""Programs that use groups, and classes of groups, in verl's ways."""

import copy
from types import SimpleNamespace

import pytest
import ray
import torch
from program_workers import Calculator
from verl import DataProto
from verl.protocol import _padding_size_key
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    dispatch_dp_compute_data_proto,
    get_predefined_dispatch_fn,
    register,
)
from verl.single_controller.base.worker_group import WorkerGroup
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    split_resource_pool,
)
from verl.single_controller.ray.base import func_generator

from quadriga.backends.ray import Nsight, RayWorkerGroup as QuadrigaRayWorkerGroup
from quadriga.errors import CallTimeoutError, DispatchError, UnregisteredMethodError


@pytest.fixture
def group(calculators):
    return calculators


def test_the_workers_of_a_group_are_called(group):
    assert [ray.get(worker.tensor.remote(1)).tolist() for worker in group.workers] == [[0.0], [1.0]]
    assert ray.get(group.workers[1].rank_plus.remote(1)) == 2
    assert group.world_size == len(group.workers) == len(group.worker_names)


def test_ray_shows_the_processes_of_a_group(group):
    group._block_until_all_workers_alive()
    assert [group._is_worker_alive(worker) for worker in group.workers] == [True, True]
    assert set(group.worker_names) <= set(ray.util.list_named_actors())
    prefix, tables = group.resource_pool.name_prefix, ray.util.placement_group_table().values()
    assert [t["state"] for t in tables if t["name"].startswith(prefix)] == ["CREATED"]
    assert ray.available_resources()["CPU"] < ray.cluster_resources()["CPU"]


def test_one_worker_is_called(group):
    ref = group._execute_remote_single_worker(group.workers[1], "own", "x", y=1)
    assert ray.get(ref) == (1, "x", 1)


def test_lists_are_split_by_execute_all(group):
    assert ray.get(group.execute_all("own", ["a", "b"], y=[1, 2])) == [(0, "a", 1), (1, "b", 2)]
    assert group.execute_all_sync("own", ["a", "b"]) == [(0, "a", 0), (1, "b", 0)]
    assert ray.get(group.execute_all("own", ["a"], y=1)) == [(0, ["a"], 1), (1, ["a"], 1)]
    assert ray.get(group.execute_rank_zero("own", ["a", "b"])) == (0, ["a", "b"], 0)


class HalfGroup(RayWorkerGroup):
    """A group with an execute mode, a functor and a binding policy of its own."""

    def execute_first_half(self, method_name, *args, **kwargs):
        def call(i):
            own = {name: value[i] for name, value in kwargs.items()}
            worker, parts = self.workers[i], [arg[i] for arg in args]
            return self._execute_remote_single_worker(worker, method_name, *parts, **own)

        return [call(i) for i in range(self.world_size // 2)]

    def _bind_worker_method(self, user_defined_cls, func_generator):
        self.calls = []
        return super()._bind_worker_method(user_defined_cls, traced)


def traced(self, method_name, dispatch_fn, collect_fn, execute_fn, blocking):
    class Functor:
        def __call__(this, *args, **kwargs):
            self.calls.append((type(this).__name__, execute_fn.__name__))
            args, kwargs = dispatch_fn(self, *args, **kwargs)
            output = execute_fn(method_name, *args, **kwargs)
            return collect_fn(self, ray.get(output) if blocking else output)

    return type(method_name, (Functor,), {})()


@pytest.mark.nightly
def test_an_execute_mode_and_a_functor_of_ones_own(start, mode_workers):
    class Plain(RayWorkerGroup):
        execute_first_half = HalfGroup.execute_first_half

    plain = start(mode_workers.Half, group=Plain)
    assert plain.where(x=5) == [5]  # with the functor of the library
    group = HalfGroup.from_detached(worker_handles=plain.workers)
    assert group.where(10) == [10]
    assert group.everywhere() == [0, 1]
    assert group.calls == [("where", "execute_first_half"), ("everywhere", "execute_all")]
    assert type(group.where).__name__ == "where"


class Backwards(RayWorkerGroup):
    """The last rank comes first."""

    def execute_all_async(self, method_name, *args, **kwargs):
        return super().execute_all_async(method_name, *args, **kwargs)[::-1]

    def execute_rank_zero_async(self, method_name, *args, **kwargs):
        return self._execute_remote_single_worker(self.workers[-1], method_name, *args, **kwargs)


def test_calls_that_wait_run_through_the_execute_functions_of_ones_own(group):
    backwards = Backwards.from_detached(worker_handles=group.workers)
    assert backwards.execute_all_sync("own", ["a", "b"]) == [(1, "b", 0), (0, "a", 0)]
    assert backwards.execute_rank_zero_sync("own", "x") == (1, "x", 0)
    assert group.execute_rank_zero_sync("own", "x") == (0, "x", 0)


class WithoutInternals(RayWorkerGroup):
    def _bind_worker_method(self, user_defined_cls, func_generator):
        names = super()._bind_worker_method(user_defined_cls, func_generator)
        hidden = [name for name in names if name.startswith("read_")]
        for name in hidden:
            delattr(self, name)
        return [name for name in names if name not in hidden]


def test_a_binding_policy_of_ones_own(group):
    by_class = WithoutInternals.from_detached(worker_handles=group.workers)

    def chosen(worker_class, record):
        return not record.name.startswith("read_")

    by_option = RayWorkerGroup.from_detached(worker_handles=group.workers, binding=chosen)
    for chosen in (by_class, by_option):
        assert ray.get(chosen.rank_plus(1)) == [1, 2]
        assert chosen.method_names == []  # as in verl, until `fuse`
        assert not hasattr(chosen, "read_future")


def test_a_functor_ends_at_the_deadline_of_its_group(monkeypatch):
    waits = []

    def get(refs, timeout=None):
        waits.append((refs, timeout))
        raise ray.exceptions.GetTimeoutError("planted")

    monkeypatch.setattr(ray, "get", get)
    group = SimpleNamespace(_ranks=SimpleNamespace(timeout=7.0))
    functions = (lambda group: ((), {}), lambda group, output: output, lambda name: ["a", "b"])
    functor = func_generator(group, "work", *functions, blocking=True)
    with pytest.raises(CallTimeoutError, match="work exceeded its deadline of 7 s"):
        functor()
    assert waits == [(["a", "b"], 7.0)]


def test_the_library_functor_takes_functions_of_the_caller(group):
    functions = {"dispatch_fn": lambda worker_group, x: (([x, x + 1],), {})}
    functions |= {"collect_fn": lambda worker_group, output: sum(output)}
    functions |= {"execute_fn": group.execute_all}
    functor = func_generator(group, "add", **functions, blocking=True)
    before = group.add(0)
    assert functor(1) == sum(before) + 3
    assert type(functor).__name__ == "add"


def test_functions_of_the_library_are_called_with_a_group(group):
    padded = DataProto.from_dict({"a": torch.arange(3)}, auto_padding=True)
    for attributes in (Calculator.in_place, Calculator.by_mesh):
        mode = getattr(attributes, MAGIC_ATTR)["dispatch_mode"]
        functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
        name, execute = attributes.__name__, group.execute_all
        functor = func_generator(group, name, **functions, execute_fn=execute, blocking=True)
        result = functor(padded)
        assert len(result) == 3 and not result.non_tensor_batch
    args, kwargs = dispatch_dp_compute_data_proto(group, padded)
    assert (len(args[0]), kwargs) == (2, {_padding_size_key: 1})
    assert list(dispatch_dp_compute_data_proto(group, data=padded[0:2])[1]) == ["data"]
    assert isinstance(args, list)  # a dispatch function may add to it


def dispatch_by_known_mesh(worker_group, data):
    """As verl's functions do, ask the ranks once and note their answers in the group."""
    if "actor" not in worker_group._dispatch_info:
        answers = worker_group._query_dispatch_info("actor")
        worker_group._dispatch_info["actor"] = answers[::-1]
    parts = data.chunk(2)
    return [[parts[dp] for dp in worker_group._dispatch_info["actor"]]], {}


def test_a_dispatch_function_notes_what_it_asked(group):
    mode = {"dispatch_fn": dispatch_by_known_mesh, "collect_fn": lambda group, output: output}

    class Asks(Calculator):
        in_place = register(dispatch_mode=mode)(lambda self, data: data)

    held = RayClassWithInitArgs(Asks)
    attached = RayWorkerGroup.from_detached(worker_handles=group.workers, ray_cls_with_init=held)
    data = DataProto.from_dict({"a": torch.arange(2)})
    answers = [part.batch["a"].tolist() for part in attached.in_place(data)]
    assert attached._dispatch_info == {"actor": [1, 0]}
    assert answers == [[2], [1]]
    assert group._dispatch_info.get("actor", [0, 1]) == [0, 1]


class Own(WorkerGroup):
    """A group of plain Ray actors, with only verl's base class."""

    def __init__(self, actors, cls):
        super().__init__(resource_pool=None)
        self._workers = actors
        self._bind_worker_method(cls, func_generator)

    def execute_all(self, method_name, *args, **kwargs):
        each = zip(*args, strict=True) if args else [()] * self.world_size
        parts = zip(self._workers, each, strict=True)
        return [getattr(worker, method_name).remote(*part) for worker, part in parts]


def test_a_group_of_ones_own_over_plain_actors(cluster):
    class Plain:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def answer(self):
            return 42

    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(2)]
    group = Own(actors, Plain)
    assert group.answer() == [42, 42]
    assert (group.world_size, isinstance(group, WorkerGroup)) == (2, True)
    held = RayClassWithInitArgs(Plain)
    with pytest.raises(DispatchError, match="ranks that a worker group has started, got Actor"):
        RayWorkerGroup.from_detached(worker_handles=actors, ray_cls_with_init=held)
    for actor in actors:
        ray.kill(actor)


class OwnOfCalculators(Own):
    def execute_rank_zero(self, method_name, *args, **kwargs):
        return getattr(self._workers[0], method_name).remote(*args, **kwargs)


def test_a_group_of_ones_own_asks_its_workers_for_their_meshes(group):
    own = OwnOfCalculators(group.workers, Calculator)
    future = own.by_mesh(DataProto.from_dict({"a": torch.arange(4)}))
    assert future.get().batch["rank"].tolist() == [0, 0, 1, 1]
    assert own._dispatch_info == {"actor": [0, 1]}
    assert own._collect_info == {"actor": [True, True]}
    assert len(own.replicated(DataProto.from_dict({"a": torch.arange(4)})).futures) == 1


def test_attributes_that_dispatch_functions_read(group):
    assert isinstance(group, WorkerGroup)
    assert isinstance(group.resource_pool, RayResourcePool)
    assert group.ray_cls_with_init.cls is Calculator
    assert (group.fused_worker_used, group.sub_cls_name, group.device_name) == (False, "", "cpu")
    assert group.execute_all_sync("roles") == [[], []]
    assert group._process_dispatch_config == [2]
    assert (group.profile_steps, group.worker_nsight_options) == (None, None)
    assert group._workers == group.workers
    assert group._worker_names == group.worker_names
    assert (group._master_addr, group._master_port) == (group.master_address, group.master_port)
    mode = get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
    assert mode["dispatch_fn"](group, 1, k=2) == (([1, 1],), {"k": [2, 2]})


def test_an_attached_group_finds_its_classes(group):
    attached = RayWorkerGroup.from_detached(
        name_prefix=group.name_prefix, worker_handles=group.workers
    )
    assert attached.add(0) == group.add(0)
    assert ray.get(attached.execute_all("tensor", 1))[1].tolist() == [1.0]
    by_name = RayWorkerGroup.from_detached(
        worker_names=group.worker_names, ray_cls_with_init=group.ray_cls_with_init
    )
    assert by_name.add(0) == group.add(0)


def test_a_copy_of_a_group_calls_the_same_workers(group):
    twin = copy.deepcopy(group)
    before = group.add(0)
    assert twin.add(1) == [value + 1 for value in before]


def roles():
    return {
        "actor": RayClassWithInitArgs(ray.remote(Calculator), 10),
        "critic": RayClassWithInitArgs(ray.remote(Calculator), start=20),
    }


def test_two_roles_in_one_process(start):
    both = start(create_colocated_worker_cls(roles()), ranks=1)
    views = both.spawn(prefix_set={"actor", "critic"})
    assert (views["actor"].add(1), views["critic"].add(1)) == ([11], [21])
    assert views["critic"].execute_all_sync("roles") == [["actor", "critic"]]
    assert both.actor_add(1) == [12]
    assert ray.get(both.execute_all("critic_add", 1)) == [22]
    assert ray.get(views["actor"].rank_plus(3)) == [3]
    assert ray.get(views["critic"].workers[0].critic_add.remote(1)) == 23
    assert ray.get(views["actor"].execute_all_async("actor_add", 1)) == [13]
    assert views["actor"].execute_rank_zero_sync("critic_add", 1) == 24
    assert (views["actor"].actor_add(1), views["actor"].critic_add(1)) == ([14], [25])
    with pytest.raises(UnregisteredMethodError, match="actor_nothing"):
        views["actor"].actor_nothing(1)


def test_a_fused_group(start):
    held = create_colocated_worker_cls_fused(roles())
    assert (held.fused_worker_used, held.cls.is_fused_worker) == (True, True)
    assert held.cls.raw_cls_dict == {"actor": Calculator, "critic": Calculator}
    fused = start(held, ranks=1)
    views = fused.spawn(prefix_set={"actor", "critic"})
    assert (views["actor"].add(1), views["critic"].add(1)) == ([11], [21])
    assert (views["actor"].sub_cls_name, views["actor"].fused_worker_used) == ("actor", True)
    fused.fuse({"actor", "critic"})
    assert fused.actor.add(1) == [12]
    assert fused.wg_dict == {"actor": fused.actor, "critic": fused.critic}
    assert "execute_func_rank_zero" in fused.method_names and views["actor"].method_names == []
    worker = fused.workers[0]
    assert ray.get(worker._fuw_execute.remote("critic_fwmn_add", 1)) == 22
    assert ray.get(views["critic"].execute_all("add", 1)) == [23]
    assert views["critic"].execute_all_sync("roles") == [["actor", "critic"]]


def scaled(worker, data, factor=1):
    return DataProto.from_dict({"a": data.batch["a"] * factor + worker.rank})


def test_a_function_of_the_driver_runs_in_the_workers(group):
    data = DataProto.from_dict({"a": torch.ones(4)})
    result = group.execute_with_func_generator(scaled, data)
    assert result.batch["a"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert group.execute_func_rank_zero(max, 3, 4) == 4
    assert group.first(["kept", "whole"]) == (0, ["kept", "whole"])


@pytest.mark.nightly
def test_two_groups_on_parts_of_a_pool(cluster):
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    held = RayClassWithInitArgs(ray.remote(Calculator))
    groups = [
        RayWorkerGroup(part, held, device_name="cpu", use_gpu=False)
        for part in split_resource_pool(pool, 1)
    ]
    assert [group.add(0) for group in groups] == [[0], [0]]
    for group in groups:
        group.shutdown()
    pool.release()


def test_a_profiled_group_with_gpus_runs_under_nsys(cluster, monkeypatch):
    taken = []
    note = lambda self, *args, **options: taken.append(options)  # noqa: E731
    monkeypatch.setattr(QuadrigaRayWorkerGroup, "__init__", note)
    options = {"trace": "cuda,nvtx", "capture-range": "cudaProfilerApi", "capture-range-end": None}
    held = RayClassWithInitArgs(ray.remote(Calculator))
    for use_gpu, steps in ((True, [1, 5]), (False, [1, 5]), (True, None)):
        pool = RayResourcePool([1], use_gpu=use_gpu)
        RayWorkerGroup(
            pool, held, use_gpu=use_gpu, profile_steps=steps, worker_nsight_options=options
        )
    flags = {**options, "capture-range-end": "repeat-shutdown:12"}
    assert taken == [{"profiler": Nsight(flags)}, {}, {}]
