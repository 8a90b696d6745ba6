"""The Ray backend: ranks are actors, calls are actor tasks, remote fields are Ray objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray

from quadriga.backends.ray.calls.row_store import StoreName, make_store, servers
from quadriga.backends.ray.calls.store import RayStore
from quadriga.backends.ray.calls.submission import RayCallBackend
from quadriga.backends.ray.cluster import RaySession, ensure_ray, is_last
from quadriga.backends.ray.group import RayWorkerGroup
from quadriga.backends.ray.placement.class_with_args import RayClassWithInitArgs, RayColocatedClass
from quadriga.backends.ray.placement.placement_groups import alive_nodes
from quadriga.backends.ray.placement.pool import RayResourcePool
from quadriga.errors import PlacementError
from quadriga.single_controller.placement.feasibility import check_feasible
from quadriga.single_controller.placement.resource_pool import ResourcePool
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs


class RayBackend(RayCallBackend):
    """Implement `quadriga.single_controller.backend.Backend` on Ray.

    Options that are passed through (`**options`) are typed where they are read: `ensure_ray`,
    `RayResourcePool`, `RayWorkerGroup`.
    """

    name = "ray"

    def __init__(self, store: StoreName | RayStore = "auto") -> None:
        """`store`: how fields that are stored on another node are read.

        "auto": if the ranks of one node need at most an eighth of the rows of a shard, the node of
        the shard cuts them out and sends them; otherwise the whole shard is fetched. "rows": they
        are always cut out. "shards": whole shards are always fetched.
        """
        super().__init__(store)
        self._session: RaySession | None = None
        self._pools: list[RayResourcePool] = []

    def start(self, **options: Any) -> None:
        """Connect to Ray (see `ensure_ray`). `shutdown` ends what this started."""
        self._session = ensure_ray(**options)
        self.store = make_store(self.store)  # what the old one knows of a cluster is forgotten

    def shutdown(self) -> None:
        """Release the pools that were made here, and close the session of `start`.

        The last session of the process also ends the row servers, and Ray if a session started it.
        Pools of detached groups stay: those groups outlive this driver. If one part cannot be
        ended, the others are ended before its error is raised.
        """
        pools, self._pools = self._pools, []
        with ExitStack() as stack:  # which calls the last callback first
            if self._session is not None:
                stack.callback(self._session.close)
            if ray.is_initialized():
                if is_last(self._session):
                    stack.callback(servers.stop)
                for pool in reversed(pools):
                    if not pool.detached:
                        stack.callback(pool.release)

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> RayResourcePool:
        """Return a `RayResourcePool`, which `shutdown` releases.

        It is for one group unless `max_colocate_count` says otherwise. `name`: its name in
        messages. `options`: further arguments of `RayResourcePool`, and `use_gpu=None`, which asks
        for GPUs if a node of the cluster has any. The node of the controller may have none.
        """
        options.setdefault("max_colocate_count", 1)
        if options.get("use_gpu", True) is None:
            options["use_gpu"] = any(
                node.resources.get(kind, 0) > 0 for node in alive_nodes() for kind in ("GPU", "NPU")
            )
        pool = RayResourcePool(process_on_nodes, **options)
        pool.label = name or pool.label
        self._pools.append(pool)
        return pool

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Raise PlacementError unless all pools fit on the nodes of the cluster together.

        The error names a pool and what it lacks. The first of the pools that is used places all.
        """
        asked = (pool.roots() for pool in pools if isinstance(pool, RayResourcePool))
        ours = tuple({id(root): root for roots in asked for root in roots}.values())
        check_feasible([pool.needs() for pool in ours], alive_nodes())
        for pool in ours:
            pool.placed_together = ours

    def class_with_args(self, cls: type, *args: object, **kwargs: object) -> RayClassWithInitArgs:
        """Return a worker class with its arguments."""
        return RayClassWithInitArgs(cls, *args, **kwargs)

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> RayColocatedClass:
        """Return several roles that share one process."""
        return RayColocatedClass(dict(classes))

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: Any
    ) -> RayWorkerGroup:
        """Start a `RayWorkerGroup`. Raises `PlacementError` for a pool of another backend."""
        if not isinstance(pool, RayResourcePool | None):
            raise PlacementError(
                f"A group on Ray needs a pool on Ray (backend.resource_pool), got {pool!r}.",
                wanted=pool.store,
            )
        return RayWorkerGroup(pool, cls, backend=self, **options)
