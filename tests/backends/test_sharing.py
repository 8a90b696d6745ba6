"""Several roles in one process, in both styles, on both backends."""

import numpy as np
import pytest
from worker_cases import Adder, Coroutines, Mirror, Neighbour, Nested

from group_fixtures import local_group, ray_nightly
from quadriga.backends import get_backend
from quadriga.errors import DispatchError, UnregisteredMethodError
from quadriga.single_controller import Dispatch, create_colocated_worker_raw_cls, register


def two_roles(backend):
    return {
        "actor": backend.class_with_args(Adder, 1),
        "actor_rollout": backend.class_with_args(Neighbour),
    }


@ray_nightly
def test_fused_class_with_views(start, backend):
    fused = create_colocated_worker_raw_cls(two_roles(backend))

    class Hybrid(fused):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def both(self, x):
            return self.actor.add(x) + self.actor_rollout.ask(x)[0]

    group = start(Hybrid, 2)
    assert group.both(1) == [4, 6]
    group.fuse(["actor", "actor_rollout"])
    assert group.actor.add(1) == [2, 3]
    roles = ["Hybrid", "actor", "actor_rollout"]
    assert group.actor_rollout.ask(1) == [(2, 0, roles), (3, 1, roles)]
    assert group.spawn_fused({"actor"})["actor"].add(5) == [6, 7]


@ray_nightly
def test_coroutines_of_colocated_roles(start, backend):
    roles = {
        "actor": backend.class_with_args(Coroutines, 1),
        "mirror": backend.class_with_args(Mirror),
    }
    views = start(None, 2, roles=roles).spawn(roles)
    assert views["mirror"].ask_later(1) == [2, 3]
    assert views["actor"].later(0.01) == [0, 1]
    assert views["actor"].add(0) == [1, 2]


def test_nested_workers():
    assert local_group(Nested).through(1) == [(101, 2), (102, 2)]


def test_roles_must_be_classes_with_arguments():
    backend = get_backend("local")
    with pytest.raises(DispatchError, match="Role 'actor' must be a class with its arguments"):
        backend.colocate({"actor": Adder})
    with pytest.raises(DispatchError, match="At least one role"):
        backend.colocate({})


def test_methods_need_a_role_where_there_are_several():
    group = local_group(None, 1, roles=two_roles(get_backend("local")))
    with pytest.raises(UnregisteredMethodError, match="actor_add"):
        group.add(1)
    assert group.execute_all_sync("actor_add", 1) == [2]
    with pytest.raises(UnregisteredMethodError, match="Take the view of one role"):
        group.execute_all_sync("unregistered")
    assert group.spawn({"actor"})["actor"].execute_all_sync("unregistered") == ["here"]


def test_what_a_worker_changes_in_place_stays_with_it(cases):
    array, numbers, table = np.zeros(50_000), [1], {"x": [1]}
    assert cases.spoil(array, numbers, table) == [50_000.0, 50_000.0]
    assert (array.sum(), numbers, table) == (0.0, [1], {"x": [1]})
