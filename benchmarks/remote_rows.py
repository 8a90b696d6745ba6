"""Bytes that cross nodes, and time, when a permuted batch is read: whole shards, or rows cut there.

    python benchmarks/remote_rows.py --out result.json
    python benchmarks/remote_rows.py --quick            # smoke test

The cluster is simulated on this machine (`ray.cluster_utils`): one head without ranks and `nodes`
nodes with `ranks` ranks each. Every rank stores a shard of one field, the controller permutes the
rows, and every rank reads its part, so each needs 1 / (nodes × ranks) of each shard. Bytes are
counted: those of the objects that Ray copied to another node, by its own record of their locations,
and those of rows that were cut. Links of simulated nodes are as fast as memory, so the times are
those of a network that costs nothing; the bytes are those of any network.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

from quadriga import DataProto, Dispatch, Worker, register
from quadriga.backends.ray import RayBackend
from quadriga.backends.ray.store import StoreName
from quadriga.protocol.columns import RemoteColumn
from quadriga.protocol.storage import traffic

WIDTH = 4096
"""Columns of float32: a row has 16 KiB."""
STORES: tuple[StoreName, ...] = ("shards", "rows", "auto")
Numbers = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A cluster of `nodes` with `ranks` ranks each, and the rows of each rank."""

    nodes: int
    ranks: int
    rows: int


FULL = (Case(2, 1, 1024), Case(4, 1, 512), Case(4, 2, 256), Case(8, 1, 256))
QUICK = (Case(2, 1, 32),)


class Reader(Worker):
    """Makes a shard, and reads rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto) -> DataProto:
        """Return a field whose values are the number of the row."""
        return DataProto.from_dict({"x": data.batch["row"][:, None].float().repeat(1, WIDTH)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def read(self, data: DataProto) -> tuple[list[float], float, int]:
        """Return the first column, the seconds of the read, and the bytes that were cut."""
        traffic.reset()
        began = time.monotonic()
        first = data.batch["x"][:, 0].tolist()
        return first, time.monotonic() - began, traffic.reset().cut_bytes


def one_permutation(group: Any, ranks: int, rows: int, seed: int) -> Numbers:
    """Store, permute, read; return seconds, and bytes per node: needed, and received."""
    count = ranks * rows
    data = group.make(DataProto.from_dict({"row": torch.arange(count)}))
    column = data.batch.columns["x"]
    assert isinstance(column, RemoteColumn)
    stored = [cast(Any, handle).ref for handle in column.handles]
    node_of = [handle.facts.node_id for handle in group._ranks.handles]
    homes = {
        ref: node_of[s.origin.rank] for ref, s in zip(stored, column.row_map.shards, strict=True)
    }
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    data.reorder(order)
    began = time.monotonic()
    answers = group.read(data)
    seconds = time.monotonic() - began
    assert [row for found, _, _ in answers for row in found] == order.float().tolist()
    received: Counter[str] = Counter()
    for ref, place in get_object_locations(list(homes)).items():
        for node in set(place["node_ids"]) - {homes[ref]}:
            received[node] += place["object_size"]
    for (_, _, nbytes), node in zip(answers, node_of, strict=True):
        received[node] += nbytes
    nodes = len(set(node_of))
    return {
        "seconds": seconds,
        "read_seconds_of_slowest_rank": max(spent for _, spent, _ in answers),
        "MB_received_per_node": sum(received.values()) / nodes / 1e6,
        "MB_needed_per_node": count * WIDTH * 4 * (nodes - 1) / nodes**2 / 1e6,
    }


def measure(case: Case, repeats: int) -> dict[str, Numbers]:
    """Run one case with every store, in turn, on one cluster; return medians."""
    memory = max(150 * 2**20, 6 * case.ranks * case.nodes * case.rows * WIDTH * 4)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": memory},
    )
    try:
        for _ in range(case.nodes):
            cluster.add_node(num_cpus=len(STORES) * case.ranks, object_store_memory=memory)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        groups = {}
        for name in STORES:
            backend = RayBackend(store=name)
            pool = backend.resource_pool([case.ranks] * case.nodes, use_gpu=False)
            groups[name] = backend.worker_group(pool, backend.class_with_args(Reader))
        runs: dict[str, list[Numbers]] = {name: [] for name in STORES}
        for number in range(repeats + 1):
            for name, group in groups.items():
                found = one_permutation(group, case.nodes * case.ranks, case.rows, number)
                if number:  # the first touches new memory and connects the nodes
                    runs[name].append(found)
        return {
            name: {key: statistics.median(run[key] for run in found) for key in found[0]}
            for name, found in runs.items()
        }
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Run and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--quick", action="store_true", help="one small case, one repeat")
    options = parser.parse_args()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    results = {}
    for case in QUICK if options.quick else FULL:
        key = f"{case.nodes} nodes, {case.ranks} ranks each"
        print(key, file=sys.stderr, flush=True)
        results[key] = measure(case, 1 if options.quick else options.repeats)
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
