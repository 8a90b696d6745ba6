"""A cluster of three simulated nodes on this machine; prints what a test then checks."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

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


def node_bundles(pool: RayResourcePool) -> list[int]:
    tables = [ray.util.placement_group_table(pg) for pg in pool.get_placement_groups()]
    return [len(set(table["bundles_to_node_id"].values())) for table in tables]


def start(pool: RayResourcePool, cls: type = Adder, **options: object) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(cls), **options)


def devices_of(group: RayWorkerGroup) -> list[str | None]:
    return [handle.facts.devices for handle in group._ranks.handles]


def devices(small_node: str) -> dict[str, object]:
    """Two accelerators that exist by name only, on the node that says it has the type wanted."""
    seen: dict[str, object] = {}
    options = {"use_gpu": True, "accelerator_type": "A100"}
    whole = RayResourcePool([2], max_colocate_count=1, **options)
    group = start(whole)
    beside = RayWorkerGroup(None, RayClassWithInitArgs(Adder), sharing_with=group)
    seen["on the node of that type"] = {h.facts.node_id for h in group._ranks.handles} == {
        small_node
    }
    seen["one device a rank"] = devices_of(group)
    seen["the same beside"] = devices_of(beside)
    for one in (beside, group):
        one.shutdown()
    whole.release()
    halves = RayResourcePool([1], max_colocate_count=2, **options)
    groups = [start(halves, name_prefix=name) for name in ("actor", "critic")]
    seen["two groups on one device"] = [devices_of(one) for one in groups]
    for one in groups:
        one.shutdown()
    halves.release()
    try:
        RayResourcePool([1], max_colocate_count=1, accelerator_type="H100").get_placement_groups()
    except PlacementError as error:
        seen["a type that no node has"] = str(error)
    return seen


def packed() -> dict[str, object]:
    """One placement group that no node can hold alone."""
    pool = RayResourcePool([5], use_gpu=False, max_colocate_count=1)
    group = start(pool, bin_pack=False)
    places = group.environment()
    by_node: dict[int, list[str]] = {}
    for node, place in zip(nodes_of(group), places, strict=True):
        by_node.setdefault(node, []).append(place["LOCAL_RANK"] + "/" + place["LOCAL_WORLD_SIZE"])
    group.shutdown()
    pool.release()
    return {"packed over nodes": sorted(by_node.values(), key=len)}


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            **NODE,
        },
    )
    small = cluster.add_node(num_cpus=2, num_gpus=2, resources={"A100": 1}, **NODE)
    cluster.add_node(num_cpus=3, **NODE)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    seen: dict[str, object] = {**devices(small.node_id), **packed()}

    pool = RayResourcePool([2, 3], use_gpu=False, max_colocate_count=1)
    try:
        RayResourcePool([4], use_gpu=False, max_colocate_count=1).get_placement_groups()
    except PlacementError as error:
        seen["too big for any node"] = str(error)

    # The smaller group comes first in the pool; the node with three CPUs must be left to the other.
    seen["one node per group"] = node_bundles(pool)
    _, right = split_resource_pool(pool, [1, 4])
    group = start(right, Cases, role="actor")
    seen["nodes of ranks"] = nodes_of(group)
    seen["local ranks"] = right.local_rank_list()
    doomed = next(
        rank for rank, handle in enumerate(group._ranks.handles)
        if handle.facts.node_id == small.node_id
    )  # fmt: skip
    waiting = group.stuck_on.submit(doomed, "absent")
    began = time.monotonic()
    threading.Timer(0.5, cluster.remove_node, (small,), {"allow_graceful": False}).start()
    try:
        waiting.get()
    except WorkerDiedError as error:
        seen["lost node"] = [error.role, error.method, nodes_of(group)[error.rank]]
        seen["lost node is the doomed one"] = nodes_of(group)[doomed] == nodes_of(group)[error.rank]
    seen["seconds"] = time.monotonic() - began
    seen["alive"] = 4
    while seen["alive"] == 4 and time.monotonic() - began < 10:
        time.sleep(0.5)
        seen["alive"] = sum(group._is_worker_alive(worker) for worker in group.workers)
    print(json.dumps(seen))
    ray.shutdown()
    cluster.shutdown()


main()
