"""Programs about what a worker knows of its place."""

import os
import sys
from pathlib import Path

import pytest
import ray
from hand_workers import Counted
from program_workers import Calculator
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.megatron.worker import MegatronWorker
from verl.single_controller.base.worker import DistGlobalInfo, DistRankInfo


class Placed(Calculator):
    """A worker that reads verl's attributes."""

    def private(self):
        return [self._rank, self._world_size, self._local_rank, self._local_world_size]

    def public(self):
        return [self.rank, self.world_size]

    def addresses(self):
        return (self._master_addr, self._master_port), self.get_master_addr_port()

    def devices(self):
        return self.get_cuda_visible_devices()

    def free_port(self):
        return self.get_available_master_addr_port()

    def renamed(self):
        self._rank = 7
        return self._rank

    def stored(self):
        store = {"_rank": self.rank, "_world_size": 2, "_master_addr": "10.0.0.9"}
        self._configure_with_store(store)
        return os.environ["MASTER_ADDR"], self._master_addr

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def other(self):
        return None


@pytest.fixture(scope="module")
def group(start_for_module):
    return start_for_module(Placed)


@pytest.mark.nightly
def test_the_private_attributes_of_a_worker(group):
    assert group.execute_all_sync("private") == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert group.execute_all_sync("public") == [[0, 2], [1, 2]]
    assert group.execute_all_sync("renamed") == [7, 7]


def test_the_environment_of_a_worker(group):
    variables = group.execute_all_sync("variables")
    for rank, found in enumerate(variables):
        expected = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        assert {name: found[name] for name in expected} == expected
        assert (found["RAY_LOCAL_RANK"], found["RAY_LOCAL_WORLD_SIZE"]) == (str(rank), "2")
        assert (found["WG_PREFIX"], found["WG_BACKEND"]) == (group.name_prefix, "ray")
    assert variables[0]["MASTER_ADDR"] == variables[1]["MASTER_ADDR"] == group.master_address
    assert variables[0]["MASTER_PORT"] == variables[1]["MASTER_PORT"] == group.master_port


def test_the_names_of_the_variables():
    assert Worker.env_keys()[:6] == [
        "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    ]  # fmt: skip


def test_addresses_and_devices(group):
    private, public = group.execute_rank_zero_sync("addresses")
    assert private == public == (group.master_address, group.master_port)
    assert isinstance(group.execute_rank_zero_sync("devices"), str)
    address, port = group.execute_rank_zero_sync("free_port")
    assert address and 0 < int(port) < 65536
    nodes = ray.get([worker.get_node_id.remote() for worker in group.workers])
    assert nodes == [ray.get_runtime_context().get_node_id()] * 2


def test_a_worker_configured_from_a_store(group):
    assert group.execute_all_sync("stored") == [("10.0.0.9", "10.0.0.9")] * 2


def test_the_mesh_of_each_rank(group):
    assert group._query_dispatch_info("actor") == [0, 1]
    assert group._query_collect_info("actor") == [True, True]
    assert group.execute_rank_zero_sync("get_dispatch_collect") == {
        "dispatch_dp_rank": {"actor": 0, "replicas": 0},
        "collect_dp_rank": {"actor": True, "replicas": True},
    }


def by_hand(cls, rank, prefix, **more):
    # Ray alone does not send the path of the driver.
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    variables = {**place, "WG_PREFIX": prefix, "WG_BACKEND": "ray", "PYTHONPATH": path, **more}
    return ray.remote(num_cpus=0)(cls).options(runtime_env={"env_vars": variables}).remote()


@pytest.mark.nightly
def test_workers_made_by_hand_find_each_other(cluster):
    workers = [by_hand(Counted, rank, "hand") for rank in range(2)]
    places = ray.get([worker.place.remote() for worker in workers])
    assert [(rank, size) for rank, size, _ in places] == [(0, 2), (1, 2)]
    assert places[0][2] == places[1][2]
    address, port = places[0][2]
    assert ray.get(workers[1].center.remote()) == {"MASTER_ADDR": address, "MASTER_PORT": port}
    assert int(port) > 0
    for worker in workers:
        ray.kill(worker)


def test_a_worker_whose_init_is_disabled(cluster):
    worker = by_hand(Counted, 1, "alone", DISABLE_WORKER_INIT="1")
    assert ray.get(worker.place.remote())[:2] == (1, 2)  # it waits for no rank 0
    ray.kill(worker)


class Layered(MegatronWorker):
    """A worker with a rank layout of tensor and pipeline parallelism."""

    def __init__(self):
        super().__init__()
        self.register_layout(tp=2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def layout(self):
        return self.get_megatron_rank_info(), self.get_megatron_global_info()

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE)
    def mine(self, x):
        return x


def test_the_layout_of_each_rank(start):
    group = start(Layered)
    sizes = DistGlobalInfo(tp_size=2, dp_size=1, pp_size=1, cp_size=1)
    assert group.layout() == [
        (DistRankInfo(tp_rank=tp, dp_rank=0, pp_rank=0, cp_rank=0), sizes) for tp in range(2)
    ]
    assert group.mine(["x"]) == ["x"]


def test_the_register_center_of_a_group(start):
    group = start(Counted, ranks=1, register_center=True)
    center = ray.get_actor(f"{group.name_prefix}_register_center")
    expected = {"MASTER_ADDR": group.master_address, "MASTER_PORT": group.master_port}
    assert ray.get(center.get_rank_zero_info.remote()) == expected
    ray.kill(center)
