"""Binding policies: which registered methods become attributes of a group."""

import pytest

from group_fixtures import ray_nightly
from quadriga.errors import UnregisteredMethodError
from quadriga.single_controller import Dispatch, Worker, register

pytestmark = ray_nightly


def hidden(function):
    """Flag a method that programs do not call."""
    function.hidden = True
    return function


class Counter(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self):
        return self.rank + 1

    @hidden
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self):
        return "reset"


def no_flagged(worker_class, record):
    return not getattr(getattr(worker_class, record.name), "hidden", False)


def test_a_policy_leaves_methods_out(start):
    group = start(Counter, 2, binding=no_flagged)
    assert group.count() == [1, 2] and not hasattr(group, "reset")
    with pytest.raises(UnregisteredMethodError, match="policy leaves out is called by name, call"):
        group.reset()
    assert group.call_all("reset") == ["reset"] * 2  # by name, every method can be called


def test_the_views_of_the_roles_have_the_policy_of_the_group(start, backend):
    roles = {role: backend.class_with_args(Counter) for role in "ab"}
    group = start(None, 2, roles=roles, binding=no_flagged)
    view = group.spawn(["b"])["b"]
    assert group.a_count() == view.count() == [1, 2]
    assert not hasattr(group, "a_reset") and not hasattr(view, "reset")
