"""A cluster of three simulated nodes whose ranks read rows of each other."""

import logging
import os
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations

sys.path.insert(0, str(Path(__file__).parent))

from worker_cases import WIDTH, Reader

from quadriga.backends.ray import RayBackend
from quadriga.backends.ray.cluster import this_node
from quadriga.backends.ray.store import servers
from quadriga.errors import LostObjectError
from quadriga.protocol import DataProto
from quadriga.protocol.storage import traffic

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ROW = 4 * WIDTH
NODES = 3
NODE = {"num_cpus": 1, "object_store_memory": 150 * 2**20}  # one rank per node
WHOLE = [0, 0, 0], [2, 2, 2]
"""What `permuted` returns if whole shards are fetched: each of the other nodes has a copy."""


class Seen:
    """Runs one store and notes what its readers received."""

    def __init__(self, name):
        self.backend = RayBackend(store=name)
        self.pool = self.backend.resource_pool([1] * NODES, use_gpu=False)
        self.group = self.backend.worker_group(
            self.pool, self.backend.class_with_args(Reader), role="reader", timeout=60
        )

    def end(self):
        self.group.shutdown()
        self.pool.release()

    def make(self, rows):
        return self.group.make(DataProto.from_dict({"row": torch.arange(rows)}))

    def copies(self, data):
        """How many nodes besides its own have a copy of each object of the batch."""
        columns = [c for c in data.batch.columns.values() if hasattr(c, "handles")]
        refs = {handle.ref for column in columns for handle in column.handles}
        return [len(p["node_ids"]) - 1 for p in get_object_locations(list(refs)).values()]

    def permuted(self, rows):
        """All ranks read their part of a permuted batch. Return the rows that were cut out for
        each, and how many nodes have a copy of each shard."""
        data = self.make(rows)
        whole = data[:]
        order = torch.arange(rows).reshape(3, -1).T.reshape(-1)
        data.reorder(order)
        found = self.group.read(data, ["one", "two", "rag"])
        assert [row for first, _ in found for row in first] == order.tolist()
        return [cut / ROW for _, cut in found], self.copies(whole)

    def on_the_controller(self):
        """The controller reads one of the nine rows of a rank on another node."""
        nodes = [handle.facts.node_id for handle in self.group._ranks.handles]
        row = 9 * next(rank for rank, node in enumerate(nodes) if node != this_node())
        data = self.make(27)
        whole = data[:]
        traffic.reset()
        assert data[row : row + 1].batch["one"][:, -1].tolist() == [row]
        return traffic.reset().cut_bytes / ROW, max(self.copies(whole))


def check_killed_servers(seen):
    """Whole objects are fetched when the row servers were killed."""
    for server in servers._known.values():
        ray.kill(server)
    assert seen.permuted(9) == WHOLE
    servers.stop()


def check_ended_ranks(seen):
    """The nodes of ranks that have ended cut out their rows."""
    data = seen.make(27)
    seen.group.shutdown()
    seen.group.wait_until_ended()
    traffic.reset()
    found = [data[row : row + 1].batch["one"][:, -1].tolist() for row in (0, 9, 18)]
    assert found == [[0.0], [9.0], [18.0]] and traffic.reset().cut_bytes / ROW >= 2


def check_lost_node(cluster, doomed, seen):
    """The node of a rank is lost, and the controller reads its rows: the error names the rank."""
    data = seen.make(9)
    nodes = [handle.facts.node_id for handle in seen.group._ranks.handles]
    lost = nodes.index(doomed.node_id)
    cluster.remove_node(doomed, allow_graceful=False)
    began = time.monotonic()
    with pytest.raises(LostObjectError) as caught:
        while time.monotonic() - began < 60:
            data[3 * lost : 3 * lost + 1].batch["one"]
            time.sleep(0.2)
    error = caught.value
    assert (error.field, error.rank, error.method) == ("one", lost, "make")


def main():
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **NODE})
    added = [cluster.add_node(**NODE) for _ in range(NODES - 1)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    shards = Seen("shards")
    assert shards.permuted(9) == WHOLE and shards.on_the_controller()[0] == 0
    shards.end()
    # Each rank needs one row of two other nodes; `rag` has rows of half to one and a half times the
    # bytes of a row of the others, and 8 bytes for each of its offsets.
    rows = Seen("rows")
    cut, copies = rows.permuted(9)
    assert all(5 <= count < 7.1 for count in cut) and copies == [0, 0, 0]
    assert rows.on_the_controller() == (1, 0) and len(servers._known) == NODES
    check_killed_servers(rows)
    rows.end()
    # By default a few rows are cut out, and a third is not.
    auto = Seen("auto")
    assert auto.permuted(9) == WHOLE and auto.on_the_controller() == (1, 0)
    check_ended_ranks(auto)
    auto.pool.release()
    check_lost_node(cluster, added[-1], Seen("auto"))
    ray.shutdown()
    cluster.shutdown()


main()
