"""A worker class together with the arguments it will be built with."""

from __future__ import annotations

from typing import Any

from quadriga.errors import DispatchError


class ClassWithInitArgs:
    """`cls(*args, **kwargs)`, to be built later and elsewhere: calling the object builds it.

    `cls` may be a plain class or one that went through `ray.remote`.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles that one process of this class hosts, in the order they are built.

        A class by itself is one role under its own name.
        """
        return {self.cls.__name__: self}

    @property
    def shares_process(self) -> bool:
        """Whether this stands for several roles in one process."""
        return False

    def build(self) -> Any:
        """Build the worker here, in this process."""
        return self.cls(*self.args, **self.kwargs)

    def __call__(self) -> Any:
        return self.build()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cls.__name__})"


def plain_class(cls: Any) -> type:
    """The class itself, also when `ray.remote` was put around it.

    Raises DispatchError if `cls` is not a class.
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
    """Several roles in one process, each a class with its arguments."""

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
        """Build the worker of each role here."""
        return {role: member.build() for role, member in self.class_dict.items()}
