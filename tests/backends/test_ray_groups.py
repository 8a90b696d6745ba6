"""What is special about ranks in Ray actors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from worker_cases import Adder, Arrays, Overlap

from quadriga.backends.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    merge_resource_pool,
    split_resource_pool,
)
from quadriga.errors import ConfigError, DispatchError, PlacementError, WorkerDiedError

HERE = Path(__file__).parent


@pytest.fixture
def pool(ray_backend):
    pool = RayResourcePool([4], use_gpu=False, max_colocate_count=1)
    yield pool
    pool.release()


def group_on(pool, cls=Adder, *args, **options):
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls, *args), **options)


def test_split_twice_and_merge(pool):
    left, right = split_resource_pool(pool, [3, 1])
    first, second, third = split_resource_pool(left, 1)
    assert [p.world_size for p in (left, right, first, second, third)] == [3, 1, 1, 1, 1]
    assert [p.bundle_of_rank(0) for p in (first, second, third, right)] == [
        (0, 0), (0, 1), (0, 2), (0, 3),
    ]  # fmt: skip
    joined = merge_resource_pool(third, right)
    assert joined.store == [1, 1]
    groups = [group_on(left, Adder, 10), group_on(right, Adder, 20)]
    assert [group.add(0) for group in groups] == [[10, 11, 12], [20]]
    with pytest.raises(PlacementError, match="do not divide into parts of 3"):
        split_resource_pool(pool, 3)
    with pytest.raises(PlacementError, match=r"the parts \[2, 1\] have 3"):
        split_resource_pool(pool, [2, 1])
    for group in groups:
        group.shutdown()


def test_uneven_places_across_nodes_by_arithmetic():
    uneven = RayResourcePool([2, 3], use_gpu=False)
    first, second = split_resource_pool(uneven, [1, 4])
    assert (first.store, second.store) == ([1], [1, 3])
    assert [second.bundle_of_rank(r) for r in range(4)] == [(0, 1), (1, 0), (1, 1), (1, 2)]
    again = split_resource_pool(second, 2)
    assert [p.store for p in again] == [[1, 1], [2]]
    assert again[1].bundle_of_rank(0) == (1, 1)
    merged = merge_resource_pool(first, again[1])
    assert merged.local_rank_list() == [0, 0, 1]


def test_bundles():
    plain = RayResourcePool([1], max_colocate_count=3, accelerator_type="A100")
    assert plain.needs().per_process == {"CPU": 3, "GPU": 1, "A100": 1e-4}
    assert plain.needs("npu").per_process == {"CPU": 3, "NPU": 1, "A100": 1e-4}
    assert RayResourcePool([1], use_gpu=False).needs().per_process == {"CPU": 10}


def test_a_pool_that_cannot_be_placed(ray_backend):
    with pytest.raises(PlacementError, match="that is 2000 CPU; no node has that much"):
        RayResourcePool([200], use_gpu=False).get_placement_groups()
    with pytest.raises(PlacementError, match="1 GPU"):
        RayResourcePool([1], max_colocate_count=1).get_placement_groups()


def test_a_share_of_a_device():
    options = RayClassWithInitArgs(Adder).actor_options(num_gpus=1 / 4)
    assert (options["num_gpus"], options["num_cpus"]) == (0.25, 1)
    npu = RayClassWithInitArgs(Adder).actor_options(num_gpus=1 / 4, device_name="npu")
    assert npu["resources"] == {"NPU": 0.25}


def test_names_and_a_name_taken(pool):
    group = group_on(pool, name_prefix="run_", register_center=True)
    assert group.worker_names == [f"run_Adder_0:{i}" for i in range(4)]
    center = ray.get_actor("run__register_center")
    zero = ray.get(center.get_rank_zero_info.remote(), timeout=30)
    assert zero == {"MASTER_ADDR": group.master_address, "MASTER_PORT": group.master_port}
    other = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    with pytest.raises(ConfigError, match=r"'run_Adder_0:0' exists already"):
        group_on(other, name_prefix="run_")
    group.shutdown()
    other.release()


def test_groups_started_at_once_have_ports_of_their_own(pool):
    groups = [group_on(part) for part in split_resource_pool(pool, 1)]
    assert len({group.master_port for group in groups}) == 4
    for group in groups:
        group.shutdown()


def test_beside_another_group_and_by_handle(pool):
    first = group_on(pool, Adder, 1)
    beside = group_on(None, Adder, 2, sharing_with=first)
    assert beside.add(0) == [2, 3, 4, 5]
    single = RayClassWithInitArgs(ray.remote(Adder), 7)(sharing_with=first.workers[0])
    assert ray.get(single.add.remote(1), timeout=30) == 8
    assert ray.get(first.workers[1].add.remote(1), timeout=30) == 3
    assert ray.get(first.execute_all("add", 1)[1].ref, timeout=30) == 3
    for group in (first, beside):
        group.shutdown()
    ray.kill(single)


def test_without_a_pool_or_a_class():
    with pytest.raises(DispatchError, match="needs a resource_pool"):
        RayWorkerGroup(None, RayClassWithInitArgs(Adder))
    with pytest.raises(DispatchError, match="needs ray_cls_with_init"):
        RayWorkerGroup(None, None)


def test_another_driver_takes_a_detached_group_over(ray_backend):
    """This driver starts the group and leaves; the second finds it by its names."""
    address = ray.get_runtime_context().gcs_address
    drivers = [("start", "3"), ("take", "11 12")]
    for what, expected in drivers:
        run = subprocess.run(
            [sys.executable, str(HERE / "detached_driver.py"), what, address],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout


def test_a_detached_worker_that_does_not_exist(ray_backend):
    with pytest.raises(WorkerDiedError, match="No worker named 'nobody'"):
        RayWorkerGroup.from_detached(
            worker_names=["nobody"], ray_cls_with_init=RayClassWithInitArgs(Adder)
        )


def test_coroutine_calls_interleave(pool):
    group = group_on(pool, Overlap)
    futures = [group.meet(3) for _ in range(3)]
    assert [future.get() for future in futures] == [[3] * 4] * 3
    group.shutdown()


def test_a_worker_process_loads_only_what_it_uses(pool):
    group = group_on(pool, Arrays)
    assert (
        group.loaded(["torch", "tensordict", "transformers", "worker_cases"])
        == [["worker_cases"]] * 4
    )
    group.shutdown()


def test_a_class_from_a_file_that_cannot_be_imported(pool, tmp_path):
    """A user's own file, loaded by its path, adds a dispatch mode and a worker that uses it."""
    import importlib.util

    from quadriga.single_controller import Dispatch

    path = tmp_path / "my_roles.py"
    path.write_text(
        "from quadriga.single_controller import Dispatch, Worker, register\n"
        "from quadriga.single_controller import register_dispatch_mode\n"
        "def spread(group, n):\n"
        "    return ([n * r for r in range(group.world_size)],), {}\n"
        "MODE = register_dispatch_mode('SPREAD', spread, lambda group, out: sum(out))\n"
        "class Judge(Worker):\n"
        "    @register(dispatch_mode=Dispatch.SPREAD)\n"
        "    def judge(self, n):\n"
        "        return n + len([m for m in Dispatch if m.name == 'SPREAD'])\n"
    )
    spec = importlib.util.spec_from_file_location("my_roles", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_roles"] = module
    try:
        spec.loader.exec_module(module)
        group = group_on(pool, module.Judge)
        assert group.judge(10) == 0 + 10 + 20 + 30 + 4
        group.shutdown()
    finally:
        del sys.modules["my_roles"]
        Dispatch.remove("SPREAD")
