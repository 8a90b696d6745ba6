"""Several nodes, simulated on this machine by `ray.cluster_utils`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def seen():
    program = Path(__file__).with_name("cluster_program.py")
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=150
    )
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


def test_ranks_of_a_part_of_an_uneven_pool_are_in_the_order_of_nodes(seen):
    assert seen["one node per group"] == [1, 1]
    assert seen["nodes of ranks"] == [0, 1, 1, 1]
    assert seen["local ranks"] == [0, 0, 1, 2]


def test_a_packed_group_over_several_nodes_knows_its_local_ranks(seen):
    per_node = seen["packed over nodes"]
    assert sum(map(len, per_node)) == 5
    assert len(per_node) in (2, 3)
    for places in per_node:
        assert sorted(places) == [f"{rank}/{len(places)}" for rank in range(len(places))]


def test_devices(seen):
    assert seen["on the node of that type"]
    assert sorted(seen["one device a rank"]) == ["0", "1"]
    assert seen["the same beside"] == seen["one device a rank"]
    first, second = seen["two groups on one device"]
    assert first == second and first[0] in ("0", "1")
    assert "0.0001 H100; no node has that much" in seen["a type that no node has"]


def test_a_pool_that_no_node_can_hold_is_refused_although_the_total_suffices(seen):
    assert "wants 4 processes on one node" in seen["too big for any node"]


def test_groups_of_one_size_are_sorted_by_the_number_in_their_nodes_address(monkeypatch):
    """10.0.0.9 comes before 10.0.0.10; groups of another size keep their place in the pool."""
    from quadriga.backends.ray import pool as placing
    from quadriga.backends.ray.cluster import RayNode

    class Group:
        def __init__(self, node, bundle_count):
            self.node, self.bundle_count = node, bundle_count

    addresses = {"a": "10.0.0.10", "b": "10.0.0.9", "c": "10.0.0.1"}
    nodes = [RayNode(node, at, 0, True, {}) for node, at in addresses.items()]
    monkeypatch.setattr(placing, "cluster_nodes", lambda: nodes)
    monkeypatch.setattr(placing, "nodes_of_bundles", lambda group: {0: group.node})
    groups = [Group("a", 2), Group("c", 3), Group("b", 2)]
    assert [g.node for g in placing.sort_by_node_address(groups)] == ["b", "c", "a"]
    names = [*map(placing._address_key, ["node-b", "10.0.0.2", "node-a", "10.0.0.11"])]
    assert sorted(names) == [names[1], names[3], names[2], names[0]]


def test_a_lost_node_is_noticed(seen):
    assert seen["lost node"][:2] == ["actor", "stuck_on"]
    assert seen["lost node is the doomed one"]
    assert seen["seconds"] < 10
    assert seen["alive"] == 3
