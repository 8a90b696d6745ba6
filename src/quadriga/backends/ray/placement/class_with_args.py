"""`RayClassWithInitArgs`: a worker class with its arguments and what its process asks of Ray."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from quadriga.single_controller.ranks.class_with_args import (
    ClassWithInitArgs,
    ColocatedClass,
    create_colocated_worker_raw_cls,
)


class RayClassWithInitArgs(ClassWithInitArgs):
    """`cls(*args, **kwargs)` in a Ray actor, built when the object is called."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.ray_options: dict[str, Any] = dict(getattr(cls, "_default_options", None) or {})
        self.additional_resources: dict[str, float] = {}

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set Ray actor options (`runtime_env`, `max_concurrency`, …)."""
        self.ray_options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Ask for custom resources of the node, per process."""
        self.additional_resources = dict(additional_resource)

    def actor_options(
        self,
        placement_group: Any = None,
        bundle_index: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
    ) -> dict[str, Any]:
        """The options of one process of this class. `num_gpus`: its share of one device."""
        options = dict(self.ray_options)
        if sharing_with is not None:
            node_id = ray.get(sharing_with.quadriga_facts.remote(), timeout=60).node_id
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options.setdefault("num_cpus", 0)
            options["num_gpus"] = 0
            return options
        if placement_group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=placement_group,
                placement_group_bundle_index=bundle_index,
                placement_group_capture_child_tasks=False,
            )
        options.setdefault("num_cpus", 1)
        resources = dict(options.get("resources") or {}) | self.additional_resources
        if use_gpu and device_name == "npu":
            resources["NPU"] = num_gpus
        elif use_gpu:
            options["num_gpus"] = num_gpus
        if resources:
            options["resources"] = resources
        return options

    def __call__(
        self,
        placement_group: Any = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = False,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
    ) -> Any:
        """Start one rank by itself: in a bundle of a placement group, or on the node and with
        the devices of `sharing_with`. Returns its actor handle, on which every public method of
        the class can be called."""
        from quadriga.backends.ray.process.start import start_single

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
    """One process with one worker per role. Its group offers `<role>_<method>` and `spawn`."""
    return RayColocatedClass(class_dict)


def create_colocated_worker_cls_fused(
    class_dict: dict[str, ClassWithInitArgs],
) -> RayClassWithInitArgs:
    """A fused class with one attribute per role. Its group offers `fuse` and `spawn_fused`."""
    return RayClassWithInitArgs(create_colocated_worker_raw_cls(copy.copy(class_dict)))
