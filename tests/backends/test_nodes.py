"""Several nodes, simulated on this machine by `ray.cluster_utils`."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from processes import run_python
from quadriga.errors import PlacementError
from quadriga.single_controller.resource_pool import NodeResources


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


def test_a_wait_for_bundles_ends_when_their_node_is_found_lost(monkeypatch):
    """Ray shows a node that is gone for some seconds. Each look takes one."""
    from quadriga.backends.ray import pool as placing

    looks, removed = [], []

    def nodes():
        looks.append(None)
        names = ["a", "b"] if len(looks) < 4 else ["a"]
        return [NodeResources(name, {"CPU": 2.0}) for name in names]

    def wait(_, timeout):
        raise GetTimeoutError

    monkeypatch.setattr(placing, "alive_nodes", nodes)
    monkeypatch.setattr(placing.ray, "get", wait)
    monkeypatch.setattr(placing, "free_resources", dict)
    monkeypatch.setattr(placing, "placement_group", lambda **_: SimpleNamespace(ready=object))
    monkeypatch.setattr(placing, "remove_placement_group", removed.append)
    monkeypatch.setattr(
        placing.ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: None)
    )
    pool = placing.RayResourcePool([2, 2], use_gpu=False, max_colocate_count=1)
    with pytest.raises(PlacementError, match="is left without 2 CPU on one node"):
        pool.get_placement_groups()
    assert len(looks) == 4 and len(removed) == 2 and pool.pgs is None
