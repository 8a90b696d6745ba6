"""A cluster of three simulated nodes on this machine: where ranks are, and the loss of a node."""

import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import Adder, Cases

from quadriga.backends.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    split_resource_pool,
)
from quadriga.errors import PlacementError, WorkerDiedError

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
NODE = {"object_store_memory": 250 * 2**20}


def nodes_of(group: RayWorkerGroup) -> list[int]:
    """For each rank the number of its node, in order of appearance."""
    ids = [handle.facts.node_id for handle in group._ranks.handles]
    order = list(dict.fromkeys(ids))
    return [order.index(node) for node in ids]


def start(pool: RayResourcePool, cls: type = Adder, **options: object) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls), **options)


def devices_of(group: RayWorkerGroup) -> list[str | None]:
    return [handle.facts.devices for handle in group._ranks.handles]


def check_devices(small_node: str) -> None:
    """Two accelerators that exist by name only, on the node that says it has the type wanted."""
    options = {"use_gpu": True, "accelerator_type": "A100"}
    whole = RayResourcePool([2], max_colocate_count=1, **options)
    group = start(whole)
    beside = RayWorkerGroup(None, RayClassWithInitArgs(Adder), sharing_with=group)
    assert {h.facts.node_id for h in group._ranks.handles} == {small_node}
    assert sorted(devices_of(group)) == ["0", "1"]
    assert devices_of(beside) == devices_of(group)
    for one in (beside, group):
        one.shutdown()
    whole.release()
    halves = RayResourcePool([1], max_colocate_count=2, **options)
    groups = [start(halves, name_prefix=name) for name in ("actor", "critic")]
    assert devices_of(groups[0]) == devices_of(groups[1])
    assert devices_of(groups[0])[0] in ("0", "1")
    for one in groups:
        one.shutdown()
    halves.release()
    with pytest.raises(PlacementError, match=r"0\.0001 H100; no node has that much"):
        RayResourcePool([1], max_colocate_count=1, accelerator_type="H100").get_placement_groups()


def check_packed() -> None:
    """One placement group that no node can hold alone: its ranks know their places on the nodes."""
    pool = RayResourcePool([5], use_gpu=False, max_colocate_count=1)
    group = start(pool, bin_pack=False)
    by_node: dict[int, list[str]] = {}
    for node, place in zip(nodes_of(group), group.environment(), strict=True):
        by_node.setdefault(node, []).append(place["LOCAL_RANK"] + "/" + place["LOCAL_WORLD_SIZE"])
    assert len(by_node) in (2, 3)
    for places in by_node.values():
        assert sorted(places) == [f"{rank}/{len(places)}" for rank in range(len(places))]
    group.shutdown()
    pool.release()


def check_lost_node(cluster: Cluster, small: object, group: RayWorkerGroup) -> None:
    """The wait for a rank ends within seconds when its node is lost."""
    on_small = [handle.facts.node_id == small.node_id for handle in group._ranks.handles]
    doomed = on_small.index(True)
    waiting = group.stuck_on.submit(doomed, "absent")
    began = time.monotonic()
    threading.Timer(0.5, cluster.remove_node, (small,), {"allow_graceful": False}).start()
    with pytest.raises(WorkerDiedError) as caught:
        waiting.get()
    assert time.monotonic() - began < 10
    assert (caught.value.role, caught.value.method) == ("actor", "stuck_on")
    assert on_small[caught.value.rank]
    while (alive := sum(map(group._is_worker_alive, group.workers))) == 4:
        assert time.monotonic() - began < 20
        time.sleep(0.5)
    assert alive == 3


def main() -> None:
    head = {"num_cpus": 1, "include_dashboard": False, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    small = cluster.add_node(num_cpus=2, num_gpus=2, resources={"A100": 1}, **NODE)
    cluster.add_node(num_cpus=3, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    check_devices(small.node_id)
    check_packed()
    with pytest.raises(PlacementError, match="wants 4 processes on one node"):
        RayResourcePool([4], use_gpu=False, max_colocate_count=1).get_placement_groups()
    # The smaller group comes first in the pool; the node with three CPUs must be left to the other.
    pool = RayResourcePool([2, 3], use_gpu=False, max_colocate_count=1)
    _, right = split_resource_pool(pool, [1, 4])
    group = start(right, Cases, role="actor")
    assert nodes_of(group) == [0, 1, 1, 1]
    assert right.local_rank_list() == [0, 0, 1, 2]
    check_lost_node(cluster, small, group)
    ray.shutdown()
    cluster.shutdown()


main()
