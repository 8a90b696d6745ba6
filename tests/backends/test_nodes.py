"""Several nodes, simulated on this machine by `ray.cluster_utils`."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import run_python


@pytest.mark.nightly
@pytest.mark.parametrize("program", ["cluster_program.py", "rows_program.py"])
def test_three_nodes(program):
    run_python(Path(__file__).with_name(program), timeout=170)


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
