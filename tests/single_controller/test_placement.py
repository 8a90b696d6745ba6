"""Pools, and whether they fit on given nodes."""

import pytest

from quadriga.errors import PlacementError
from quadriga.single_controller import ResourcePool, merge_resource_pool, split_resource_pool
from quadriga.single_controller.resource_pool import NodeResources, PoolNeeds, check_feasible


def nodes(*gpus: int) -> list[NodeResources]:
    return [NodeResources(f"10.0.0.{i}", {"CPU": 64, "GPU": n}) for i, n in enumerate(gpus)]


def pool(name: str, *processes: int) -> PoolNeeds:
    return PoolNeeds(name, processes, {"CPU": 1, "GPU": 1})


def test_uneven_pool():
    uneven = ResourcePool([2, 3])
    assert uneven.world_size == 5
    assert uneven.local_world_size_list() == [2, 2, 3, 3, 3]
    assert uneven.local_rank_list() == [0, 1, 0, 1, 2]
    uneven.add_node(1)
    assert uneven.store == uneven() == [2, 3, 1]


def test_bundles_of_ranks():
    uneven = ResourcePool([2, 3, 4])
    assert uneven.bundles_of_ranks()[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert uneven.counts_of(1, 5) == [1, 3, 1]
    assert [uneven.counts_of(start, 1) for start in (0, 1, 2, 8)] == [[1]] * 4
    assert [part.store for part in split_resource_pool(uneven, [2, 7])] == [[2], [3, 4]]


def test_pools_are_split_twice_and_merged():
    first, second = split_resource_pool(ResourcePool([2, 3]), [1, 4])
    assert (first.store, second.store) == ([1], [1, 3])
    halves = split_resource_pool(second, 2)
    assert [half.store for half in halves] == [[1, 1], [2]]
    merged = merge_resource_pool(first, halves[1])
    assert (merged.store, merged.local_rank_list()) == ([1, 2], [0, 0, 1])
    with pytest.raises(PlacementError, match="do not divide into parts of 2"):
        split_resource_pool(ResourcePool([2, 3]), 2)
    with pytest.raises(PlacementError, match=r"the parts \[2, 2\] have 4"):
        split_resource_pool(ResourcePool([2, 3]), [2, 2])
    with pytest.raises(PlacementError, match="agree in max_colocate_count, got 10 and 3"):
        merge_resource_pool(ResourcePool([1]), ResourcePool([1], max_colocate_count=3))


@pytest.mark.parametrize("wrong", [[0], [2, -1], [1.5]])
def test_pool_counts_are_checked(wrong):
    with pytest.raises(PlacementError, match="counts of 1 or more"):
        ResourcePool(wrong)


def test_pools_that_fit_only_in_another_order():
    check_feasible([pool("small", 2), pool("large", 6), pool("rest", 2)], nodes(8, 2))
    check_feasible([pool("a", 4, 4), pool("b", 8)], nodes(8, 8))


def test_sufficient_totals_are_not_enough():
    with pytest.raises(PlacementError, match="'actor' wants 8 processes on one node") as caught:
        check_feasible([pool("critic", 2), pool("actor", 8)], nodes(5, 5))
    assert caught.value.pool == "actor"
    assert "10.0.0.0 has 64 CPU, 5 GPU" in str(caught.value)


def test_pools_that_fit_alone_but_not_together():
    with pytest.raises(PlacementError, match="do not fit on the nodes together") as caught:
        check_feasible([pool("actor", 6), pool("critic", 6)], nodes(8, 4))
    assert caught.value.pool in ("actor", "critic")


def test_the_advice_is_about_what_lacks():
    wanted = [PoolNeeds("actor", (2,), {"CPU": 1, "GPU": 1})]
    with pytest.raises(PlacementError, match=r"No node has a GPU: set trainer[.]device=cpu"):
        check_feasible(wanted, [NodeResources("here", {"CPU": 16})])
    with pytest.raises(PlacementError, match="fewer processes on a node: each of them wants a GPU"):
        check_feasible(wanted, [NodeResources("here", {"CPU": 16, "GPU": 1})])
    with pytest.raises(PlacementError, match="lower max_colocate_count"):
        check_feasible(wanted, [NodeResources("here", {"CPU": 1, "GPU": 2})])


def test_many_parts_on_many_nodes():
    check_feasible([PoolNeeds("one each", (1,) * 1000, {"CPU": 64})], nodes(*[0] * 1000))
    with pytest.raises(PlacementError, match="do not fit on the nodes together"):
        check_feasible([PoolNeeds("one each", (1,) * 1001, {"CPU": 64})], nodes(*[0] * 1000))
    check_feasible([PoolNeeds("one bundle each", (1,) * 1280, {"CPU": 1})], nodes(0, *[0] * 19))
