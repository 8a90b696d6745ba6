"""How calls reach ranks, for every backend.

- `worker_group`: `WorkerGroup`, many ranks called as one object, and its methods; `streams`: of
  generator methods.
- `backend`: what a backend provides, and watches of groups; `keepers`: values of ranks in the
  memory of other processes.
- `dispatch`: one call: what is sent, how batches are split and results joined; `modes`: the
  dispatch and execute modes; `padding`: rows that are added so that a batch divides.
- `rank_layout`, `resource_pool`, `environment`: where ranks are and what they see.
- `worker`: the base class of the user's classes, and the decorator `@register`; `rank_host`: runs
  calls in the process of a rank.

May import `quadriga.errors` and `quadriga.protocol`. The public names load on first use. None of
them imports torch or ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.single_controller.backend import Backend as Backend
    from quadriga.single_controller.dispatch import (
        Call as Call,
        GroupView as GroupView,
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
        uneven_dispatch_mode as uneven_dispatch_mode,
    )
    from quadriga.single_controller.environment import (
        ray_noset_visible_devices as ray_noset_visible_devices,
    )
    from quadriga.single_controller.modes import (
        Dispatch as Dispatch,
        DispatchMode as DispatchMode,
        Execute as Execute,
        ExecuteMode as ExecuteMode,
        get_predefined_dispatch_fn as get_predefined_dispatch_fn,
        register_dispatch_mode as register_dispatch_mode,
        register_execute_mode as register_execute_mode,
        update_dispatch_mode as update_dispatch_mode,
        update_execute_mode as update_execute_mode,
    )
    from quadriga.single_controller.rank_layout import (
        GroupLayout as GroupLayout,
        RankLayout as RankLayout,
    )
    from quadriga.single_controller.resource_pool import (
        ResourcePool as ResourcePool,
        merge_resource_pool as merge_resource_pool,
        split_resource_pool as split_resource_pool,
    )
    from quadriga.single_controller.worker import (
        ClassWithInitArgs as ClassWithInitArgs,
        ColocatedClass as ColocatedClass,
        FusedWorker as FusedWorker,
        MethodRecord as MethodRecord,
        Worker as Worker,
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
        register as register,
    )
    from quadriga.single_controller.worker_group import (
        BindingPolicy as BindingPolicy,
        BoundMethod as BoundMethod,
        WorkerGroup as WorkerGroup,
        with_hooks as with_hooks,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
