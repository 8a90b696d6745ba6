"""Worker groups on Ray. Only this package imports ray; its names load when they are first used.

    backend.py   RayBackend: the `Backend` of the controller
    group.py     RayWorkerGroup: start or attach the ranks of a group
    programs.py  Ray's own calls, for programs of `quadriga.compat`
    cluster.py   the connection to Ray, and types for what Ray leaves untyped
    calls/       submit calls, wait for results, store large fields
    process/     the process of one rank
    health/      liveness of ranks and nodes, stacks, errors
    placement/   pools, placement groups, classes with their actor options

May import `single_controller`, `protocol` and `errors`. Imports of modules: `cluster` ← `health` ←
`calls` ← `process` ← `placement` ← `group` ← `backend`; `calls` also uses `process.memory` and
`process.user_code`, which import no module of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "Nsight": "process.profiling",
    "RayBackend": "backend",
    "RayClassWithInitArgs": "placement.class_with_args",
    "RayResourcePool": "placement.pool",
    "RayWorkerGroup": "group",
    "SubRayResourcePool": "placement.pool",
    "TorchProfiler": "process.profiling",
    "create_colocated_worker_cls": "placement.class_with_args",
    "create_colocated_worker_cls_fused": "placement.class_with_args",
    "create_colocated_worker_raw_cls": "placement.class_with_args",
    "ensure_ray": "cluster",
    "merge_resource_pool": "placement.pool",
    "split_resource_pool": "placement.pool",
}

__all__ = list(_HOME)

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
    from quadriga.backends.ray.placement.class_with_args import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
    from quadriga.backends.ray.placement.pool import RayResourcePool as RayResourcePool
    from quadriga.backends.ray.placement.pool import SubRayResourcePool as SubRayResourcePool
    from quadriga.backends.ray.placement.pool import merge_resource_pool as merge_resource_pool
    from quadriga.backends.ray.placement.pool import split_resource_pool as split_resource_pool
    from quadriga.backends.ray.process.profiling import Nsight as Nsight
    from quadriga.backends.ray.process.profiling import TorchProfiler as TorchProfiler
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
