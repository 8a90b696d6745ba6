"""How calls reach ranks, for every backend.

- `worker_group`: `WorkerGroup`, many ranks called as one object; `named_calls`: calls by name.
- `bound_method`: a method of a group and one call of it; `hooks`: code before and after calls;
  `streams`: calls of generator methods.
- `call`: what is sent for a call. `backend`: what a backend provides. `watch`: broken groups.
- `dispatch/`: split arguments and join results. `ranks/`: what runs in the process of a rank.
  `placement/`: where ranks run.

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
    "ClassWithInitArgs": "ranks.class_with_args",
    "ColocatedClass": "ranks.class_with_args",
    "Dispatch": "dispatch.builtin_modes",
    "DispatchMode": "dispatch.modes",
    "Execute": "dispatch.builtin_modes",
    "ExecuteMode": "dispatch.modes",
    "FusedWorker": "ranks.class_with_args",
    "GroupLayout": "placement.rank_layout",
    "GroupView": "call",
    "MethodRecord": "dispatch.modes",
    "RankLayout": "placement.rank_layout",
    "ResourcePool": "placement.resource_pool",
    "Worker": "ranks.worker",
    "WorkerGroup": "worker_group",
    "create_colocated_worker_raw_cls": "ranks.class_with_args",
    "get_predefined_dispatch_fn": "dispatch.modes",
    "make_nd_compute_dataproto_dispatch_fn": "dispatch.batch_modes",
    "merge_resource_pool": "placement.resource_pool",
    "ray_noset_visible_devices": "placement.devices",
    "register": "dispatch.register",
    "register_dispatch_mode": "dispatch.modes",
    "register_execute_mode": "dispatch.modes",
    "split_resource_pool": "placement.resource_pool",
    "uneven_dispatch_mode": "dispatch.batch_modes",
    "update_dispatch_mode": "dispatch.modes",
    "update_execute_mode": "dispatch.modes",
    "with_hooks": "hooks",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.single_controller.backend import Backend as Backend
    from quadriga.single_controller.bound_method import BoundMethod as BoundMethod
    from quadriga.single_controller.call import Call as Call
    from quadriga.single_controller.call import GroupView as GroupView
    from quadriga.single_controller.dispatch.batch_modes import (
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    )
    from quadriga.single_controller.dispatch.batch_modes import (
        uneven_dispatch_mode as uneven_dispatch_mode,
    )
    from quadriga.single_controller.dispatch.builtin_modes import Dispatch as Dispatch
    from quadriga.single_controller.dispatch.builtin_modes import Execute as Execute
    from quadriga.single_controller.dispatch.modes import DispatchMode as DispatchMode
    from quadriga.single_controller.dispatch.modes import ExecuteMode as ExecuteMode
    from quadriga.single_controller.dispatch.modes import MethodRecord as MethodRecord
    from quadriga.single_controller.dispatch.modes import (
        get_predefined_dispatch_fn as get_predefined_dispatch_fn,
    )
    from quadriga.single_controller.dispatch.modes import (
        register_dispatch_mode as register_dispatch_mode,
    )
    from quadriga.single_controller.dispatch.modes import (
        register_execute_mode as register_execute_mode,
    )
    from quadriga.single_controller.dispatch.modes import (
        update_dispatch_mode as update_dispatch_mode,
    )
    from quadriga.single_controller.dispatch.modes import update_execute_mode as update_execute_mode
    from quadriga.single_controller.dispatch.register import register as register
    from quadriga.single_controller.hooks import with_hooks as with_hooks
    from quadriga.single_controller.placement.devices import (
        ray_noset_visible_devices as ray_noset_visible_devices,
    )
    from quadriga.single_controller.placement.rank_layout import GroupLayout as GroupLayout
    from quadriga.single_controller.placement.rank_layout import RankLayout as RankLayout
    from quadriga.single_controller.placement.resource_pool import ResourcePool as ResourcePool
    from quadriga.single_controller.placement.resource_pool import (
        merge_resource_pool as merge_resource_pool,
    )
    from quadriga.single_controller.placement.resource_pool import (
        split_resource_pool as split_resource_pool,
    )
    from quadriga.single_controller.ranks.class_with_args import (
        ClassWithInitArgs as ClassWithInitArgs,
    )
    from quadriga.single_controller.ranks.class_with_args import ColocatedClass as ColocatedClass
    from quadriga.single_controller.ranks.class_with_args import FusedWorker as FusedWorker
    from quadriga.single_controller.ranks.class_with_args import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
    from quadriga.single_controller.ranks.worker import Worker as Worker
    from quadriga.single_controller.worker_group import BindingPolicy as BindingPolicy
    from quadriga.single_controller.worker_group import WorkerGroup as WorkerGroup
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
