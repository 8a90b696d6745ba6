"""A cluster of three simulated nodes whose ranks read rows of each other; prints what was seen."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import WIDTH, Reader

from quadriga.backends.ray import RayBackend
from quadriga.backends.ray.cluster import this_node
from quadriga.backends.ray.store import servers
from quadriga.errors import LostObjectError, QuadrigaError
from quadriga.protocol import DataProto
from quadriga.protocol.storage import traffic

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ROW = 4 * WIDTH
NODES = 3
NODE = {"num_cpus": 1, "object_store_memory": 150 * 2**20}  # one rank per node


class Seen:
    """Runs one store and notes what its readers received."""

    def __init__(self, name):
        self.backend = RayBackend(store=name)
        self.pool = self.backend.resource_pool([1] * NODES, use_gpu=False)
        self.group = self.backend.worker_group(
            self.pool, self.backend.class_with_args(Reader), role="reader", timeout=60
        )

    def make(self, rows):
        return self.group.make(DataProto.from_dict({"row": torch.arange(rows)}))

    def copies(self, data):
        """How many nodes besides its own have a copy of each object of the batch."""
        columns = [c for c in data.batch.columns.values() if hasattr(c, "handles")]
        refs = {handle.ref for column in columns for handle in column.handles}
        return [len(p["node_ids"]) - 1 for p in get_object_locations(list(refs)).values()]

    def permuted(self, rows):
        """All ranks read their part of a permuted batch."""
        data = self.make(rows)
        whole = data[:]
        order = torch.arange(rows).reshape(3, -1).T.reshape(-1)
        data.reorder(order)
        found = self.group.read(data, ["one", "two", "rag"])
        right = [row for first, _ in found for row in first] == order.tolist()
        return {
            "right": right, "cut rows": [cut / ROW for _, cut in found],
            "copies": self.copies(whole),
        }  # fmt: skip

    def on_the_controller(self):
        """The controller reads one of the nine rows of a rank on another node."""
        nodes = [handle.facts.node_id for handle in self.group._ranks.handles]
        row = 9 * next(rank for rank, node in enumerate(nodes) if node != this_node())
        data = self.make(27)
        whole = data[:]
        traffic.reset()
        right = data[row : row + 1].batch["one"][:, -1].tolist() == [row]
        return [right, traffic.reset().cut_bytes / ROW, max(self.copies(whole))]

    def without_its_server(self):
        """The row servers are killed: rows are still right, by fetching whole objects."""
        for server in servers._known.values():
            ray.kill(server)
        found = self.permuted(9)
        servers.stop()
        self.group.forget()
        return [found, self.permuted(9)["right"]]

    def after_the_ranks_have_ended(self):
        """Their rows are cut out by their nodes."""
        data = self.make(27)
        self.group.shutdown()
        self.group.wait_until_ended()
        traffic.reset()
        found = [data[row : row + 1].batch["one"][:, -1].tolist() for row in (0, 9, 18)]
        return [found, traffic.reset().cut_bytes / ROW]


def lost_node(cluster, doomed, seen):
    """The node of rank 2 is lost, and another rank reads its rows."""
    data = seen.make(9)
    nodes = [handle.facts.node_id for handle in seen.group._ranks.handles]
    lost = nodes.index(doomed.node_id)
    cluster.remove_node(doomed, allow_graceful=False)
    began = time.monotonic()
    error = None
    while error is None and time.monotonic() - began < 60:
        try:
            data[3 * lost : 3 * lost + 1].batch["one"]
            time.sleep(0.2)
        except QuadrigaError as found:
            error = found
    assert isinstance(error, LostObjectError), error
    return {"field": error.field, "rank is right": error.rank == lost, "method": error.method}


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
    added = [cluster.add_node(**NODE) for _ in range(NODES - 1)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    report = {}
    for name in ("shards", "rows"):
        seen = Seen(name)
        report[name] = {"permuted": seen.permuted(9), "controller": seen.on_the_controller()}
        if name == "rows":
            report["servers"] = len(servers._known)
            report["killed server"] = seen.without_its_server()
        seen.group.shutdown()
        seen.pool.release()
    auto = Seen("auto")
    report["auto"] = {"a third": auto.permuted(9), "one row": auto.on_the_controller()}
    report["dead ranks"] = auto.after_the_ranks_have_ended()
    auto.pool.release()
    report["lost node"] = lost_node(cluster, added[-1], Seen("auto"))
    print(json.dumps(report))
    ray.shutdown()
    cluster.shutdown()


main()
