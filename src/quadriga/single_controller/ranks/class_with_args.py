"""A worker class with its constructor arguments, and several such classes in one process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from quadriga.errors import DispatchError
from quadriga.single_controller.ranks.verl_names import VerlFusedNames
from quadriga.single_controller.ranks.worker import Worker


class ClassWithInitArgs:
    """`cls(*args, **kwargs)` to be built later, in another process. Call the object to build it.

    `cls` is a class, or the result of `ray.remote(cls)`.
    """

    def __init__(self, cls: object, *args: object, **kwargs: object) -> None:
        self.cls = plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles of one process, in the order in which they are built.

        A single class is one role, named like the class.
        """
        return {self.cls.__name__: self}

    @property
    def shares_process(self) -> bool:
        """Whether this stands for several roles in one process."""
        return False

    @property
    def fused_worker_used(self) -> bool:
        """Whether the class is one worker that builds a worker per role (`FusedWorker`)."""
        return issubclass(self.cls, VerlFusedNames)

    @fused_worker_used.setter
    def fused_worker_used(self, used: bool) -> None:
        # Programs written for verl set it. It follows from the class here.
        if used != self.fused_worker_used:
            raise DispatchError(
                f"fused_worker_used={used!r} was set for {self.cls.__name__}, which is "
                f"{'' if self.fused_worker_used else 'not '}a class of several roles "
                "(create_colocated_worker_raw_cls). Do not set it."
            )

    def build(self) -> Any:  # an instance of the user's class, which need not be a `Worker`
        """Build the worker in this process."""
        return self.cls(*self.args, **self.kwargs)

    def __call__(self) -> Any:
        return self.build()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


def plain_class(cls: object) -> type:
    """Return a class as it is, and the user's class for the result of `ray.remote`.

    Raises `DispatchError` if `cls` is neither.
    """
    metadata = getattr(cls, "__ray_metadata__", None)
    inner = getattr(metadata, "modified_class", cls)
    if metadata is not None:
        # ray.remote builds a subclass of the user's class and gives it the same name.
        inner = getattr(inner, "__ray_actor_class__", inner)
    if not isinstance(inner, type):
        raise DispatchError(f"A worker class was expected, got {cls!r}.")
    return inner


class ColocatedClass(ClassWithInitArgs):
    """Several roles in one process, each with its class and arguments."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise DispatchError("At least one role is needed to share a process, got none.")
        for role, member in class_dict.items():
            if not isinstance(member, ClassWithInitArgs):
                raise DispatchError(
                    f"Role {role!r} must be a class with its arguments (ClassWithInitArgs), got "
                    f"{type(member).__name__}."
                )
        self.class_dict = dict(class_dict)
        self.cls = type("_".join(class_dict), (), {"__module__": __name__})
        self.args = ()
        self.kwargs = {}

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        return self.class_dict

    @property
    def shares_process(self) -> bool:
        return True

    def build(self) -> dict[str, Any]:
        """Build the worker of each role in this process."""
        return {role: member.build() for role, member in self.class_dict.items()}


class FusedWorker(VerlFusedNames, Worker):
    """A worker that builds one worker per role and has it as an attribute named like the role.

    The role table of its process contains these roles too.
    """

    role_classes: ClassVar[dict[str, ClassWithInitArgs]] = {}

    fused_roles: dict[str, Worker]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.fused_roles = self.fused_worker_dict = ColocatedClass(self.role_classes).build()
        for role, worker in self.fused_roles.items():
            setattr(self, role, worker)
            worker.fused_worker_dict = self.fused_roles
            if isinstance(worker, Worker):
                worker._siblings = self.fused_roles


def create_colocated_worker_raw_cls(class_dict: dict[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """Return a class with one attribute per role, for subclasses that use several roles."""
    checked = ColocatedClass(class_dict)
    name = "Fused_" + "_".join(checked.class_dict)
    members: dict[str, object] = {
        "role_classes": checked.class_dict,
        "raw_cls_dict": {role: member.cls for role, member in checked.class_dict.items()},
        "__module__": __name__,
    }
    return type(name, (FusedWorker,), members)


def members_of(cls: type) -> dict[str, object]:
    """Return the attributes of a class by name, without those that raise when they are read."""
    members: dict[str, object] = {}
    for name in dir(cls):
        with suppress(Exception):  # a descriptor of the user's may raise anything
            members[name] = getattr(cls, name)
    return members


def roles_of(classes: dict[str, type]) -> dict[str, type]:
    """Return every role of a process with its class: the given ones and those of fused classes."""
    roles: dict[str, type] = {}
    for role, cls in classes.items():
        roles[role] = cls
        if issubclass(cls, FusedWorker):
            roles.update({inner: member.cls for inner, member in cls.role_classes.items()})
    return roles
