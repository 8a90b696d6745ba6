"""Worker groups on Ray: the only place that imports ray. Names load when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.backends.ray.backend import RayBackend as RayBackend
    from quadriga.backends.ray.cluster import ensure_ray as ensure_ray
    from quadriga.backends.ray.group import RayWorkerGroup as RayWorkerGroup
    from quadriga.backends.ray.placement.class_with_args import (
        RayClassWithInitArgs as RayClassWithInitArgs,
    )
    from quadriga.backends.ray.placement.class_with_args import (
        create_colocated_worker_cls as create_colocated_worker_cls,
    )
    from quadriga.backends.ray.placement.class_with_args import (
        create_colocated_worker_cls_fused as create_colocated_worker_cls_fused,
    )
    from quadriga.backends.ray.placement.pool import RayResourcePool as RayResourcePool
    from quadriga.backends.ray.placement.pool import SubRayResourcePool as SubRayResourcePool
    from quadriga.single_controller.placement.resource_pool import (
        merge_resource_pool as merge_resource_pool,
    )
    from quadriga.single_controller.placement.resource_pool import (
        split_resource_pool as split_resource_pool,
    )
    from quadriga.single_controller.ranks.class_with_args import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )

_HERE = "quadriga.backends.ray."

_HOME = {
    "RayBackend": _HERE + "backend",
    "RayClassWithInitArgs": _HERE + "placement.class_with_args",
    "RayResourcePool": _HERE + "placement.pool",
    "RayWorkerGroup": _HERE + "group",
    "SubRayResourcePool": _HERE + "placement.pool",
    "create_colocated_worker_cls": _HERE + "placement.class_with_args",
    "create_colocated_worker_cls_fused": _HERE + "placement.class_with_args",
    "create_colocated_worker_raw_cls": "quadriga.single_controller.ranks.class_with_args",
    "ensure_ray": _HERE + "cluster",
    "merge_resource_pool": "quadriga.single_controller.placement.resource_pool",
    "split_resource_pool": "quadriga.single_controller.placement.resource_pool",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
