"""How calls reach ranks, for every backend.

- `worker_group`: `WorkerGroup`, many ranks called as one object; `named_calls`: calls by name.
- `bound_method`: a method of a group and one call of it, with streams and hooks.
- `call`: what is sent for a call. `backend`: what a backend provides, and watches of groups.
- `dispatch`: the dispatch and execute modes, and the decorator `@register`.
- `batch_modes`: split and join batches; `padding`: rows that are added so that a batch divides.
- `rank_layout`, `resource_pool`, `environment`: where ranks are and what they see.
- `worker`: the base class of the user's classes; `rank_host`: runs calls in the process of a rank.

May import `quadriga.errors` and `quadriga.protocol`. The public names load on first use. None of
them imports torch or ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "Backend": "backend",
    "BindingPolicy": "worker_group",
    "BoundMethod": "bound_method",
    "Call": "call",
    "ClassWithInitArgs": "worker",
    "ColocatedClass": "worker",
    "Dispatch": "dispatch",
    "DispatchMode": "dispatch",
    "Execute": "dispatch",
    "ExecuteMode": "dispatch",
    "FusedWorker": "worker",
    "GroupLayout": "rank_layout",
    "GroupView": "call",
    "MethodRecord": "dispatch",
    "RankLayout": "rank_layout",
    "ResourcePool": "resource_pool",
    "Worker": "worker",
    "WorkerGroup": "worker_group",
    "create_colocated_worker_raw_cls": "worker",
    "get_predefined_dispatch_fn": "dispatch",
    "make_nd_compute_dataproto_dispatch_fn": "batch_modes",
    "merge_resource_pool": "resource_pool",
    "ray_noset_visible_devices": "environment",
    "register": "dispatch",
    "register_dispatch_mode": "dispatch",
    "register_execute_mode": "dispatch",
    "split_resource_pool": "resource_pool",
    "uneven_dispatch_mode": "batch_modes",
    "update_dispatch_mode": "dispatch",
    "update_execute_mode": "dispatch",
    "with_hooks": "bound_method",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.single_controller.backend import Backend as Backend
    from quadriga.single_controller.batch_modes import (
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    )
    from quadriga.single_controller.batch_modes import (
        uneven_dispatch_mode as uneven_dispatch_mode,
    )
    from quadriga.single_controller.bound_method import BoundMethod as BoundMethod
    from quadriga.single_controller.bound_method import with_hooks as with_hooks
    from quadriga.single_controller.call import Call as Call
    from quadriga.single_controller.call import GroupView as GroupView
    from quadriga.single_controller.dispatch import Dispatch as Dispatch
    from quadriga.single_controller.dispatch import DispatchMode as DispatchMode
    from quadriga.single_controller.dispatch import Execute as Execute
    from quadriga.single_controller.dispatch import ExecuteMode as ExecuteMode
    from quadriga.single_controller.dispatch import MethodRecord as MethodRecord
    from quadriga.single_controller.dispatch import (
        get_predefined_dispatch_fn as get_predefined_dispatch_fn,
    )
    from quadriga.single_controller.dispatch import register as register
    from quadriga.single_controller.dispatch import (
        register_dispatch_mode as register_dispatch_mode,
    )
    from quadriga.single_controller.dispatch import (
        register_execute_mode as register_execute_mode,
    )
    from quadriga.single_controller.dispatch import (
        update_dispatch_mode as update_dispatch_mode,
    )
    from quadriga.single_controller.dispatch import update_execute_mode as update_execute_mode
    from quadriga.single_controller.environment import (
        ray_noset_visible_devices as ray_noset_visible_devices,
    )
    from quadriga.single_controller.rank_layout import GroupLayout as GroupLayout
    from quadriga.single_controller.rank_layout import RankLayout as RankLayout
    from quadriga.single_controller.resource_pool import ResourcePool as ResourcePool
    from quadriga.single_controller.resource_pool import (
        merge_resource_pool as merge_resource_pool,
    )
    from quadriga.single_controller.resource_pool import (
        split_resource_pool as split_resource_pool,
    )
    from quadriga.single_controller.worker import (
        ClassWithInitArgs as ClassWithInitArgs,
    )
    from quadriga.single_controller.worker import ColocatedClass as ColocatedClass
    from quadriga.single_controller.worker import FusedWorker as FusedWorker
    from quadriga.single_controller.worker import Worker as Worker
    from quadriga.single_controller.worker import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
    from quadriga.single_controller.worker_group import BindingPolicy as BindingPolicy
    from quadriga.single_controller.worker_group import WorkerGroup as WorkerGroup
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
