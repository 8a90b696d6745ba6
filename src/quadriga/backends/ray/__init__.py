"""Worker groups on Ray. Only this package imports ray; its names load when they are first used.

    cluster          the connection to Ray
    keepers          values of ranks in the memory of other nodes
    store            the object store of fields; rows of other nodes
    health           liveness of ranks and nodes, stacks, errors
    pickling         calls with objects or code of the user
    calls            encode calls, send them and wait for their results
    referenced       a reference that is an argument
    rank_process     the process of one rank
    start            classes with their actor options, start ranks, the register center
    pool             pools and their placement groups
    backend          RayWorkerGroup and RayBackend

A module imports only modules above it. May import `single_controller`, `protocol` and `errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.backends.ray.backend import (
        RayBackend as RayBackend,
        RayWorkerGroup as RayWorkerGroup,
    )
    from quadriga.backends.ray.cluster import ensure_ray as ensure_ray
    from quadriga.backends.ray.pool import (
        RayResourcePool as RayResourcePool,
        SubRayResourcePool as SubRayResourcePool,
        merge_resource_pool as merge_resource_pool,
        split_resource_pool as split_resource_pool,
    )
    from quadriga.backends.ray.start import (
        Nsight as Nsight,
        RayClassWithInitArgs as RayClassWithInitArgs,
        create_colocated_worker_cls as create_colocated_worker_cls,
        create_colocated_worker_cls_fused as create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
