"""Ranks in Ray actors: what the local backend has not."""

import sys
import textwrap
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from worker_cases import Adder, Cases, Coroutines, Nested, group_on, taken_over

from processes import run_python
from quadriga import errors
from quadriga.backends import get_backend
from quadriga.backends.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls_fused,
    merge_resource_pool,
    split_resource_pool,
)
from quadriga.backends.ray.pool import NodeResources
from quadriga.containment import import_file
from quadriga.single_controller import Dispatch, Execute, ResourcePool, Worker, register

HERE = Path(__file__).parent


def test_a_pool_asks_for_gpus_if_a_node_has_any(ray_backend, monkeypatch):
    """The controller's machine does not decide: a head node often has no GPU."""
    assert not ray_backend.resource_pool([1], use_gpu=None).use_gpu
    node = NodeResources("10.0.0.2", {"CPU": 4.0, "GPU": 2.0})
    monkeypatch.setattr("quadriga.backends.ray.backend.alive_nodes", lambda: [node])
    assert ray_backend.resource_pool([1], use_gpu=None).use_gpu


def test_split_twice_and_merge(ray_backend):
    pool = ray_backend.resource_pool([4], use_gpu=False)
    left, right = split_resource_pool(pool, [3, 1])
    _, second, third = split_resource_pool(left, 1)
    joined = merge_resource_pool(third, right)
    assert joined.store == [1, 1]
    groups = [group_on(part, Adder, 10 * i) for i, part in enumerate([second, joined])]
    assert [group.add(0) for group in groups] == [[0], [10, 11]]
    places = [where["LOCAL_RANK"] + where["LOCAL_WORLD_SIZE"] for where in groups[1].environment()]
    assert places == ["02", "12"]  # two places of one node, also in a merged pool
    for group in groups:
        group.shutdown()
    pool.release()


def test_uneven_places_across_nodes_by_arithmetic():
    first, second = split_resource_pool(RayResourcePool([2, 3], use_gpu=False), [1, 4])
    assert second.bundles_of_ranks() == [(0, 1), (1, 0), (1, 1), (1, 2)]
    again = split_resource_pool(second, 2)
    assert [p.store for p in again] == [[1, 1], [2]]
    assert again[1].bundles_of_ranks()[0] == (1, 1)
    merged = merge_resource_pool(first, again[1])
    assert merged.local_rank_list() == [0, 0, 1]
    assert merged.bundles_of_ranks() == [(0, 0), (1, 1), (1, 2)]


def test_bundles():
    plain = RayResourcePool([1], max_colocate_count=3, accelerator_type="A100")
    assert plain.needs().per_process == {"CPU": 3, "GPU": 1, "A100": 1e-4}
    assert plain.needs("npu").per_process == {"CPU": 3, "NPU": 1, "A100": 1e-4}
    assert RayResourcePool([1], use_gpu=False).needs().per_process == {"CPU": 10}


def test_a_pool_that_cannot_be_placed(ray_backend):
    with pytest.raises(errors.PlacementError, match="1 GPU"):
        RayResourcePool([1], max_colocate_count=1).get_placement_groups()


def test_a_process_asks_for_a_share_of_a_device():
    options = RayClassWithInitArgs(Adder).actor_options(num_gpus=1 / 4)
    assert (options["num_gpus"], options["num_cpus"]) == (0.25, 1)
    npu = RayClassWithInitArgs(Adder).actor_options(num_gpus=1 / 4, device_name="npu")
    assert npu["resources"] == {"NPU": 0.25}


@pytest.mark.nightly
def test_names_of_ranks_and_a_name_that_is_taken(pool):
    group = group_on(pool, name_prefix="run_", register_center=True)
    assert group.worker_names == [f"run_Adder_0:{i}" for i in range(2)]
    assert set(group.worker_names) <= set(ray.util.list_named_actors())
    center = ray.get_actor("run__register_center")
    nodes = ray.get(center.get_worker_info.remote(), timeout=30)
    assert nodes == dict.fromkeys(range(2), ray.get_runtime_context().get_node_id())
    other = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    with pytest.raises(errors.ConfigError, match=r"'run_Adder_0:0' exists already"):
        group_on(other, name_prefix="run_")
    kept = RayResourcePool([1], use_gpu=False, max_colocate_count=1, detached=True)
    with pytest.raises(errors.PlacementError, match="another group has the prefix 'run_'"):
        group_on(kept, Nested, name_prefix="run_", register_center=True, detached=True)
    with pytest.raises(ValueError, match="run_Nested_0:0"):  # its rank was ended
        ray.get_actor("run_Nested_0:0")
    group.shutdown()
    other.release()
    kept.release()


def test_groups_started_at_once_have_ports_of_their_own(pool):
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(group_on, split_resource_pool(pool, 1), timeout=60))
    assert len({group.master_port for group in groups}) == 2
    placed = [
        table["name"]
        for table in ray.util.placement_group_table().values()
        if table["state"] == "CREATED" and table["name"].startswith(pool.name_prefix)
    ]
    assert len(placed) == 1  # once, although two threads asked for it
    for group in groups:
        group.shutdown()


@pytest.mark.nightly
def test_a_group_and_a_single_rank_share_the_places_of_a_group(pool):
    first = group_on(pool, Adder, 1)
    beside = group_on(None, Adder, 2, sharing_with=first)
    assert beside.add(0) == [2, 3]
    single = RayClassWithInitArgs(ray.remote(Adder), 7)(sharing_with=first.workers[0])
    assert ray.get(single.add.remote(1), timeout=30) == 8
    assert ray.get(first.workers[1].add.remote(1), timeout=30) == 3
    assert ray.get(first.execute_all("add", 1)[1].ref, timeout=30) == 3
    for group in (first, beside):
        group.shutdown()
    ray.kill(single)


def test_existing_workers_by_their_handles(pool):
    first = group_on(pool, Adder, 1, master_port_range=(40_000, 50_000))
    assert 40_000 <= int(first.master_port) < 50_000
    taken = taken_over(worker_handles=first.workers[::-1])
    assert taken.add(0) == [1, 2]  # in the order of the ranks, not of the handles
    assert taken.worker_names == first.worker_names
    assert taken.master_port == first.master_port
    first.shutdown()
    first.wait_until_ended()
    with pytest.raises(errors.WorkerDiedError, match="has ended"):
        taken_over(worker_handles=first.workers)


def test_options_of_a_class_reach_its_actors(ray_backend):
    cls = RayClassWithInitArgs(Adder)
    cls.update_options({"num_cpus": 0.5, "runtime_env": {"env_vars": {"MINE": "from options"}}})
    cls.set_additional_resource({"disk": 1})
    assert cls.actor_options(use_gpu=False)["resources"] == {"disk": 1}
    cls.set_additional_resource({})
    actor = cls()
    assert ray.get(actor.environment.remote(), timeout=60)["MINE"] == "from options"
    ray.kill(actor)


def test_groups_run_at_the_same_time(ray_cases, start_on_ray, tmp_path):
    """One group waits for files that the other writes. The calls of a group run in turn instead."""
    future = ray_cases.wait_for.submit(str(tmp_path / "sign"), 20)
    start_on_ray(Cases, 2).touch(str(tmp_path / "sign"))
    assert future.get() == [True, True]
    first = ray_cases.wait_for.submit(str(tmp_path / "never"), 0.3)
    ray_cases.touch(str(tmp_path / "never"))  # its turn comes when the first has given up
    assert first.get() == [False, False]


def test_a_group_needs_a_pool_and_a_class():
    with pytest.raises(errors.DispatchError, match="needs a resource_pool"):
        RayWorkerGroup(None, RayClassWithInitArgs(Adder))
    with pytest.raises(errors.DispatchError, match="needs ray_cls_with_init"):
        RayWorkerGroup(None, None)
    with pytest.raises(
        errors.PlacementError, match=r"needs a pool on Ray .* got ResourcePool\(\[2\]\)"
    ):
        get_backend("ray").worker_group(ResourcePool([2]), RayClassWithInitArgs(Adder))


def test_another_driver_takes_a_detached_group_over(ray_backend):
    """The first driver starts the group and exits; the second finds it by the names of ranks."""
    address = ray.get_runtime_context().gcs_address
    drivers = [("start", "3"), ("take", "11 12")]
    for what, expected in drivers:
        assert expected in run_python(HERE / "detached_driver.py", what, address).stdout


def test_a_detached_worker_that_does_not_exist(ray_backend):
    with pytest.raises(errors.WorkerDiedError, match="has no worker named 'absent'"):
        taken_over(worker_names=["absent"])


def test_calls_interleave_if_only_a_role_of_a_fused_class_has_coroutine_methods(pool):
    roles = {"meeting": RayClassWithInitArgs(Coroutines), "other": RayClassWithInitArgs(Adder)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls_fused(roles))
    group.fuse(roles)
    futures = [group.meeting.meet(3) for _ in range(3)]
    assert [future.get() for future in futures] == [[3] * 2] * 3
    group.shutdown()


def make_pool():
    made = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    return made.get_placement_groups()[0].id.hex()


def test_pools_of_ranks_end_with_their_group(start_on_ray):
    """Ray would keep the bundles until the driver ends."""
    group = start_on_ray(Cases, 2)
    ids = group.run(make_pool)
    ray.kill(group.workers[1])
    group.shutdown()
    assert {ray.util.placement_group_table()[id]["state"] for id in ids} == {"REMOVED"}


def test_a_worker_process_loads_only_what_it_uses(start_on_ray):
    names = ["torch", "tensordict", "transformers", "worker_cases"]
    assert start_on_ray(Cases, 1).loaded(names) == [["worker_cases"]]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """load("name", source) -> a module of a user's file, loaded by its path."""

    def _load(name, source):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        monkeypatch.setitem(sys.modules, name, None)  # removed after the test
        return import_file(path, "file", name)

    yield _load
    for registry in (Dispatch, Execute):
        for mode in registry.added():
            registry.remove(mode.name)


def test_code_of_files_loaded_by_path_is_sent_and_no_other(load, monkeypatch):
    from ray import cloudpickle

    from quadriga.backends.ray.pickling import send_code_of_loaded_files

    class Library:
        """As those that cffi adds: it says that it is a module, and has no weak references."""

        __slots__ = ()
        __class__ = types.ModuleType

    monkeypatch.setitem(sys.modules, "library", Library())
    load("my_first", "def f(): ...")
    send_code_of_loaded_files()
    monkeypatch.delitem(sys.modules, "my_first")
    load("my_second", "def f(): ...")  # as many modules as before
    send_code_of_loaded_files()
    sent = cloudpickle.list_registry_pickle_by_value()
    assert {"my_first", "my_second"} <= sent
    assert not {"worker_cases", "torch", "pytest", "quadriga", "numpy"} & sent


def test_a_users_files_that_cannot_be_imported(pool, load):
    """One file adds a dispatch and an execute mode, another a worker that uses them; both were
    loaded by their paths. The worker finds the modes in its registries, and so it does functions
    and objects of such files among its arguments and results."""
    load(
        "my_modes",
        """
        from dataclasses import dataclass
        from quadriga.single_controller import register_dispatch_mode, register_execute_mode
        @dataclass
        class Verdict:
            points: int
        def spread(group, n):
            return ([n * r for r in group.ranks],), {}
        def total(group, outputs):
            return sum(outputs)
        def odd(group):
            return range(1, group.world_size, 2)
        def double(n):
            return 2 * n
        SPREAD = register_dispatch_mode("SPREAD", spread, total)
        ODD = register_execute_mode("ODD", odd)
        """,
    )
    modes = sys.modules["my_modes"]
    roles = load(
        "my_roles",
        """
        from quadriga.single_controller import Dispatch, Execute, Worker, register
        class Judge(Worker):
            @register(dispatch_mode=Dispatch.SPREAD, execute_mode=Execute.ODD)
            def judge(self, n):
                return n + 100 * (Dispatch.SPREAD in Dispatch) + 1000 * (Execute.ODD in Execute)
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def apply(self, function, verdict):
                verdict.points = function(verdict.points)
                return verdict
        """,
    )
    group = group_on(pool, roles.Judge)
    assert group.judge(10) == 10 + 1100
    verdicts = group.apply(modes.double, modes.Verdict(4))
    assert verdicts == [modes.Verdict(8)] * 2
    group.shutdown()


class Beside(Worker):
    def __init__(self):
        super().__init__()
        self.signs = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self):
        """Wait for the calls that run beside this one."""
        for _ in range(2000):
            if len(self.signs) == 3:
                return self.signs
            time.sleep(0.01)
        return self.signs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, beside=True)
    def give(self, sign):
        if sign < 0:
            raise ValueError("a negative sign")
        self.signs.append(sign)


class AlsoAsync(Beside):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self):
        return 1


def test_a_method_runs_beside_another_one_in_the_order_of_its_calls(start_on_ray):
    group = start_on_ray(Beside, 1)
    waiting = group.wait.submit()
    with pytest.raises(errors.WorkerMethodError, match="a negative sign"):
        group.give(-1)
    for given in [group.give.submit(sign) for sign in range(3)]:
        given.get()
    assert waiting.get() == [[0, 1, 2]]
    with pytest.raises(errors.DispatchError, match="give is registered with beside=True, but"):
        start_on_ray(AlsoAsync, 1)
