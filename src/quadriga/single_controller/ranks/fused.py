"""Fused classes: one class with an attribute per role, for users who want to subclass it."""

from __future__ import annotations

from typing import Any, ClassVar

from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, ColocatedClass
from quadriga.single_controller.ranks.worker import Worker


class FusedWorker(Worker):
    """Holds a worker per role as attributes. Its process's role table has them all."""

    role_classes: ClassVar[dict[str, ClassWithInitArgs]] = {}

    fused_roles: dict[str, Worker]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.fused_roles = ColocatedClass(self.role_classes).build()
        for role, worker in self.fused_roles.items():
            setattr(self, role, worker)
            if isinstance(worker, Worker):
                worker._siblings = self.fused_roles


def create_colocated_worker_raw_cls(class_dict: dict[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """A class with one attribute per role; subclass it to use several roles in one method."""
    checked = ColocatedClass(class_dict)
    name = "Fused_" + "_".join(checked.class_dict)
    return type(name, (FusedWorker,), {"role_classes": checked.class_dict, "__module__": __name__})


def roles_within(cls: type) -> dict[str, type]:
    """The roles that building `cls` adds to its process, with their classes."""
    members: dict[str, ClassWithInitArgs] = getattr(cls, "role_classes", {})
    return {role: member.cls for role, member in members.items()}
