"""A cluster of three simulated nodes on this machine; prints what a test then checks."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import Faulty

from quadriga.backends.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    split_resource_pool,
)
from quadriga.errors import PlacementError, WorkerDiedError

NODE = {"object_store_memory": 80 * 2**20}


def nodes_of(group: RayWorkerGroup) -> list[int]:
    """For each rank the number of its node, in order of appearance."""
    ids = [handle.facts.node_id for handle in group._ranks.handles]
    order = list(dict.fromkeys(ids))
    return [order.index(node) for node in ids]


def node_bundles(pool: RayResourcePool) -> list[int]:
    tables = [ray.util.placement_group_table(pg) for pg in pool.get_placement_groups()]
    return [len(set(table["bundles_to_node_id"].values())) for table in tables]


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, **NODE},
    )
    small = cluster.add_node(num_cpus=2, resources={"A100": 1}, **NODE)
    cluster.add_node(num_cpus=3, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    seen: dict[str, object] = {}

    pool = RayResourcePool([2, 3], use_gpu=False, max_colocate_count=1)
    try:
        RayResourcePool([4], use_gpu=False, max_colocate_count=1).get_placement_groups()
    except PlacementError as error:
        seen["too big for any node"] = str(error)
    packed = RayResourcePool([5], use_gpu=False, max_colocate_count=1)
    seen["packed over nodes"] = packed.get_placement_groups("PACK")[0].bundle_count
    packed.release()

    # The smaller group comes first in the pool; the node with three CPUs must be left to the other.
    seen["one node per group"] = node_bundles(pool)
    _, right = split_resource_pool(pool, [1, 4])
    group = RayWorkerGroup(right, RayClassWithInitArgs(Faulty), role="actor")
    seen["nodes of ranks"] = nodes_of(group)
    seen["local ranks"] = right.local_rank_list()
    doomed = next(
        rank for rank, handle in enumerate(group._ranks.handles)
        if handle.facts.node_id == small.node_id
    )  # fmt: skip
    waiting = group.stuck_on.submit(doomed)
    began = time.monotonic()
    threading.Timer(0.5, cluster.remove_node, (small,), {"allow_graceful": False}).start()
    try:
        waiting.get()
    except WorkerDiedError as error:
        seen["lost node"] = [error.role, error.method, nodes_of(group)[error.rank]]
        seen["lost node is the doomed one"] = nodes_of(group)[doomed] == nodes_of(group)[error.rank]
    seen["seconds"] = time.monotonic() - began
    seen["alive"] = sum(group._is_worker_alive(worker) for worker in group.workers)
    print(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


main()
