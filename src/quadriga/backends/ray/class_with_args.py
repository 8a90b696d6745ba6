"""`RayClassWithInitArgs`: a worker class with its arguments and the options of its actor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from ray.actor import ActorClass
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from quadriga.backends.ray.start import facts_of, start_single
from quadriga.errors import ConfigError
from quadriga.single_controller.worker import ClassWithInitArgs, ColocatedClass
from quadriga.single_controller.worker import (
    create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor

REFUSED = ("max_restarts", "max_task_retries")
"""Options that would have Ray restart a rank, whose weights and process group are then lost."""


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls(*args, **kwargs)` in a Ray actor, built when the object is called."""

    def __init__(self, cls: object, *args: object, **kwargs: object) -> None:
        super().__init__(cls, *args, **kwargs)
        self.ray_options: dict[str, object] = {}
        self.additional_resources: dict[str, float] = {}
        if isinstance(cls, ActorClass):  # `ray.remote(...)` keeps its options on what it returns
            self.update_options(getattr(cls, "_default_options", None) or {})

    def update_options(self, options: Mapping[str, object]) -> None:
        """Set Ray actor options (`runtime_env`, `max_concurrency`, …).

        Raises `ConfigError` for options that would restart a rank.
        """
        for name in REFUSED:
            if options.get(name):
                raise ConfigError(
                    f"{self.cls.__name__}: the actor option {name}={options[name]!r} is not "
                    "supported. A restarted rank would have neither its weights nor its place in "
                    "the process group. Start the group again and load a checkpoint.",
                    key=name,
                )
        self.ray_options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources of the node, per process."""
        self.additional_resources = dict(additional_resource)

    def actor_options(
        self,
        placement_group: PlacementGroup | None = None,
        bundle_index: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: RankActor | None = None,
        device_name: str = "cuda",
    ) -> dict[str, object]:
        """Return the actor options of one process of this class.

        Args:
            placement_group: where the process runs; None: anywhere.
            bundle_index: bundle of that group.
            use_gpu: ask for a device.
            num_gpus: share of one device.
            sharing_with: run on the node of this rank instead, and ask for no device.
            device_name: "npu" asks for the resource NPU, anything else for GPU.
        """
        if sharing_with is not None:
            return self.options_on_node(facts_of([sharing_with])[0].node_id)
        options = dict(self.ray_options)
        if placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group,
                placement_group_bundle_index=bundle_index,
                placement_group_capture_child_tasks=False,
            )
        options.setdefault("num_cpus", 1)
        given = cast(Mapping[str, float], options.get("resources") or {})
        resources = {**given, **self.additional_resources}
        if use_gpu and device_name == "npu":
            resources["NPU"] = num_gpus
        elif use_gpu:
            options["num_gpus"] = num_gpus
        if resources:
            options["resources"] = resources
        return options

    def options_on_node(self, node_id: str) -> dict[str, object]:
        """Return the actor options of a process that shares a node, and devices, with another."""
        options = dict(self.ray_options)
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options.setdefault("num_cpus", 0)
        options["num_gpus"] = 0
        return options

    def __call__(
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = False,
        num_gpus: float = 1,
        sharing_with: RankActor | None = None,
        device_name: str = "cuda",
    ) -> RankActor:
        """Start one rank by itself and return its actor handle.

        It runs in a bundle of a placement group, or on the node and with the devices of
        `sharing_with`. Every public method of the class can be called on the handle.
        """
        options = self.actor_options(
            placement_group,
            placement_group_bundle_idx,
            use_gpu,
            num_gpus,
            sharing_with,
            device_name,
        )
        return start_single(self, options, sharing_with)


class RayColocatedClass(ColocatedClass, RayClassWithInitArgs):
    """Several roles in one Ray actor."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        ColocatedClass.__init__(self, class_dict)
        self.ray_options = {}
        self.additional_resources = {}
        for member in class_dict.values():
            if isinstance(member, RayClassWithInitArgs):
                self.ray_options.update(member.ray_options)
                self.additional_resources.update(member.additional_resources)

    __call__ = RayClassWithInitArgs.__call__


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> RayColocatedClass:
    """Return a class for one process with one worker per role.

    Its group offers `<role>_<method>` and `spawn`.
    """
    return RayColocatedClass(class_dict)


def create_colocated_worker_cls_fused(
    class_dict: dict[str, ClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Return a fused class with one attribute per role.

    Its group offers `fuse` and `spawn_fused`.
    """
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(copy.copy(class_dict)))
