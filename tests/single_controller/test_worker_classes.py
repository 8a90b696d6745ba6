"""Worker classes of a user: what Python allows in a class works in a rank or is refused by name."""

from collections.abc import Callable

import pytest
import torch

from group_fixtures import local_group
from quadriga.backends import get_backend
from quadriga.backends.local import LocalWorkerGroup
from quadriga.backends.ray.rank_process import AsyncRankProcess
from quadriga.errors import DispatchError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    ResourcePool,
    Worker,
    create_colocated_worker_raw_cls,
    register,
)

ALL = Dispatch.ONE_TO_ALL


class AnswersEverything:
    """A class without a base, with any attribute."""

    def __getattr__(self, name):
        return f"attribute {name}"

    @register(dispatch_mode=ALL)
    def get(self):
        return self.anything


class Lookup(dict):
    """A dict with attributes: a missing one is a KeyError."""

    def __getattr__(self, name):
        return self[name]


class ClassProperty:
    def __get__(self, instance, owner):
        raise RuntimeError("no device here")


class OddAttributes(Worker):
    defaults = Lookup(lr=3)
    device = ClassProperty()

    @register(dispatch_mode=ALL)
    def get(self):
        return self.defaults.lr


class Critic(Worker, torch.nn.Module):
    def __init__(self):
        Worker.__init__(self)
        torch.nn.Module.__init__(self)
        self.head = torch.nn.Linear(2, 1)

    @register(dispatch_mode=ALL)
    def get(self):
        try:
            return self.had.weight
        except AttributeError:
            return tuple(self.head.weight.shape)


class OfTheClass(Worker):
    @classmethod
    @register(dispatch_mode=ALL)
    def get(cls, x=1):
        return cls.__name__, x

    @staticmethod
    @register(dispatch_mode=ALL)
    def static(x):
        return x + 1


NAMES = [name for name in dir(AsyncRankProcess) if not name.startswith("__")]


class Names(Worker):
    """Has a method for each attribute of the actor of a rank."""

    @register(dispatch_mode=ALL)
    async def get(self):
        return [name for name in NAMES if getattr(self, name)(1) != (name, 1)]


for name in NAMES:
    setattr(Names, name, lambda self, x, name=name: (name, x))


ROLES = {
    "everything": (AnswersEverything, "attribute anything"),
    "odd": (OddAttributes, 3),
    "critic": (Critic, (1, 2)),
    "class": (OfTheClass, ("OfTheClass", 1)),
    "names": (Names, []),
}


def test_classes_of_every_kind_are_workers(start, backend):
    assert "_call" in NAMES
    roles = {role: backend.class_with_args(cls) for role, (cls, _) in ROLES.items()}
    group = start(None, 1, roles=roles)
    for role, (_, expected) in ROLES.items():
        assert getattr(group, f"{role}_get")() == [expected]
    assert group.class_static(4) == [5]


class Views(Worker):
    @register(dispatch_mode=ALL)
    def one(self, view):
        return view

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data, view, function):
        return DataProto.from_dict({"a": data.batch["a"] * view + function})


def test_an_argument_may_be_called_view():
    group = local_group(Views)
    assert group.one(view=3) == [3, 3]
    data = DataProto.from_dict({"a": torch.arange(2)})
    assert group.rows(data, view=10, function=1).batch["a"].tolist() == [1, 11]


def test_attributes_of_the_group_are_no_names_of_methods_and_declared_types_are():
    bad = type("Bad", (Worker,), {"_ranks": register(dispatch_mode=ALL)(lambda self: "mine")})
    with pytest.raises(DispatchError, match=r"Bad._ranks cannot be bound: a worker group has"):
        local_group(bad)

    class Typed(LocalWorkerGroup):
        one: Callable[..., object]

    assert Typed._bound_names({"views": Views}, "views")["one"] == ("views", "one")


class Runs(Worker):
    @register(dispatch_mode=ALL)
    def run(self):
        return "run"


class RunsB(Worker):
    @register(dispatch_mode=ALL)
    def b_run(self):
        return "b_run"


def test_names_that_two_roles_share_are_refused_before_a_process_starts():
    backend = get_backend("local")
    run, b_run = backend.class_with_args(Runs), backend.class_with_args(RunsB)
    fused = backend.class_with_args(create_colocated_worker_raw_cls({"run": run}))
    for roles, words in (
        ({"a": b_run, "a_b": run}, "a_b_run would be b_run of the role 'a' and run of the role"),
        ({"run": b_run, "f": fused}, "Two roles of one process are called 'run': RunsB and Runs"),
        ({"f": fused, "g": fused}, "Two roles of one process are called 'run': Runs and Runs"),
    ):
        with pytest.raises(DispatchError, match=words):
            backend.worker_group(ResourcePool([1]), backend.colocate(roles))
