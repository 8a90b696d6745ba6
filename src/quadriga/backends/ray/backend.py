"""The Ray backend: ranks are actors, calls are actor tasks, remote fields are Ray objects.

`RayWorkerGroup` is a worker group whose ranks are Ray actors.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import ray

from quadriga.backends.ray import cluster
from quadriga.backends.ray.calls import (
    RayBatch,
    RayMethod,
    RayPending,
    is_plain,
    pending_of,
    send_to_ranks,
    split_futures,
)
from quadriga.backends.ray.health import cluster_lost, dead_ranks, died, end_own_processes
from quadriga.backends.ray.keepers import keepers_of
from quadriga.backends.ray.pickling import shared_value
from quadriga.backends.ray.pool import (
    RayResourcePool,
    Strategy,
    alive_nodes,
    free_nodes,
    local_places,
    local_ranks,
    release_pools_of,
)
from quadriga.backends.ray.start import (
    Nsight,
    RankPlan,
    RayClassWithInitArgs,
    RayColocatedClass,
    check_profiler,
    devices_of,
    existing_actors,
    facts_of,
    start_ranks,
    start_register_center,
)
from quadriga.backends.ray.store import (
    RayStore,
    StoreName,
    is_future,
    make_store,
    packed_batch,
    serve_rows,
    servers,
)
from quadriga.errors import DispatchError, PlacementError, WorkerError
from quadriga.protocol.storage import set_process_store
from quadriga.single_controller.backend import RankHandle, RankSet, check_timeouts
from quadriga.single_controller.dispatch import Call, Pending, register_reference
from quadriga.single_controller.environment import RankEnvironment, WorkerEnv, variables_of_rank
from quadriga.single_controller.keepers import Keeper
from quadriga.single_controller.resource_pool import ResourcePool, check_feasible
from quadriga.single_controller.worker import ClassWithInitArgs
from quadriga.single_controller.worker_group import (
    BindingPolicy,
    BoundMethod,
    MethodFactory,
    WorkerGroup,
    bind_all,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref
    from quadriga.protocol import DataProtoFuture

START_TIMEOUT_S = 1800.0


class RayWorkerGroup(WorkerGroup):
    """Start one actor per rank of a pool, or attach to actors that exist.

    Args:
        resource_pool: one rank per bundle.
        ray_cls_with_init: the worker class with its arguments, or several roles.
        bin_pack: STRICT_PACK (each part of the pool on one node), else PACK.
        name_prefix: start of the names of the actors; six random characters by default.
        detached: the actors, and the bundles of the pool, outlive this driver.
        worker_names: attach to actors of these names.
        worker_handles: attach to these actors.
        device_name: "cuda" or "npu".
        worker_env: environment variables that are set before the worker's modules load: the same
            for all ranks, one mapping per rank, or a function of the rank.
        profiler: `Nsight(...)` for all ranks or some of them.
        role: the name of a class that is one role by itself, in messages.
        timeout: default deadline of a call in seconds.
        start_timeout: seconds for all `__init__`s.
        sharing_with: a group of the same size instead of a pool; rank i runs on the node and the
            devices of its rank i.
        namespace: Ray namespace of the actors.
        register_center: also start an actor `{prefix}_register_center` that knows rank 0's address.
        master_port_range: (first, last + 1), where rank 0 may reserve its port, for firewalls.
        backend: the backend that started the group, with the store of large fields.
        method_factory: makes the group's methods.
        binding: which registered methods become attributes of the group.
    """

    resource_pool: RayResourcePool | None
    register_center: object

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankActor] | None = None,
        device_name: str = "cuda",
        worker_env: WorkerEnv | None = None,
        *,
        profiler: Nsight | None = None,
        role: str | None = None,
        timeout: float | None = None,
        start_timeout: float = START_TIMEOUT_S,
        sharing_with: WorkerGroup | None = None,
        namespace: str | None = None,
        register_center: bool = False,
        master_port_range: Sequence[int] | None = None,
        backend: RayBackend | None = None,
        method_factory: MethodFactory = BoundMethod,
        binding: BindingPolicy = bind_all,
    ) -> None:
        cluster.refuse_ray_client()
        check_timeouts("RayWorkerGroup", timeout=timeout, start_timeout=start_timeout)
        backend = backend or RayBackend()
        set_process_store(backend.store)
        if ray_cls_with_init is None:
            raise DispatchError("RayWorkerGroup needs ray_cls_with_init, to know the methods.")
        cls = ray_cls_with_init
        built, roles, single = self._roles_of(cls, role, binding)  # raises before a process starts
        self.resource_pool = resource_pool
        existing = worker_names is not None or worker_handles is not None
        if existing:
            given = {
                "worker_env": worker_env, "sharing_with": sharing_with, "detached": detached,
                "register_center": register_center, "master_port_range": master_port_range,
                "profiler": profiler,
            }  # fmt: skip
            if unused := [option for option, value in given.items() if value]:
                raise DispatchError(
                    f"RayWorkerGroup attaches to ranks that run already, so {', '.join(unused)} "
                    "has no effect; give it to the group that starts the ranks."
                )
            actors = existing_actors(worker_names, worker_handles, namespace)
            facts = facts_of(actors)
            handles = [RankHandle(a, f.name, f) for a, f in zip(actors, facts, strict=True)]
            handles.sort(key=lambda handle: handle.facts.rank)
            prefix = name_prefix or handles[0].facts.group_prefix
        else:
            prefix = name_prefix or uuid.uuid4().hex[:6]
            if not isinstance(cls, RayClassWithInitArgs):
                cls = RayClassWithInitArgs(cls.cls, *cls.args, **cls.kwargs)
            placed = _placed(cls, resource_pool, sharing_with, bin_pack, device_name, detached)
            lifetime = {"lifetime": "detached" if detached else None, "namespace": namespace}
            options = {name: value for name, value in lifetime.items() if value is not None}
            check_profiler(profiler, len(placed))
            plans = []
            for rank, (suffix, local, actor, variables) in enumerate(placed):
                actor = {**actor, **options}
                plans.append(
                    RankPlan(
                        f"{prefix}{cls.cls.__name__}_{suffix}",
                        RankEnvironment(rank, len(placed), *local, group_prefix=prefix),
                        profiler.options_of_rank(rank, actor) if profiler else actor,
                        {**variables_of_rank(worker_env, rank, len(placed)), **variables},
                    )
                )
            name, ports = cls.cls.__name__, master_port_range
            store = backend.store
            handles = start_ranks(plans, built, name, start_timeout, store, port_range=ports)
        with _killed_after_an_error([] if existing else handles):
            if register_center:
                known = [handle.facts for handle in handles]
                self.register_center = start_register_center(prefix, known, detached, namespace)
            serve_rows(backend.store, {handle.facts.node_id for handle in handles})
            ranks = RankSet(backend, handles, roles, prefix, timeout)
            super().__init__(ranks, single, method_factory, binding)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankActor] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Attach to ranks that another program started, by their names or handles.

        `kwargs`: further arguments of the class. Raises `WorkerDiedError` if a rank does not exist,
        `CallTimeoutError` if one is busy for longer than a minute.
        """
        return cls(
            None, ray_cls_with_init, name_prefix=name_prefix, worker_names=worker_names,
            worker_handles=worker_handles, **kwargs,
        )  # fmt: skip

    def shutdown(self) -> None:
        """End the processes of the group, and remove the pools that its ranks have made."""
        if cluster_lost():  # it could not be asked for anything
            self.stop_worker_aliveness_check()
            end_own_processes()
            return
        super().shutdown()
        release_pools_of([actor._actor_id.hex() for actor in self.workers])


_Placed = tuple[str, tuple[int, int], dict[str, object], dict[str, str]]
"""End of the name of a rank, (local rank, local world size), options of Ray, variables."""


def _placed(
    cls: RayClassWithInitArgs,
    pool: RayResourcePool | None,
    sharing_with: WorkerGroup | None,
    bin_pack: bool,
    device_name: str,
    detached: bool,
) -> list[_Placed]:
    """Return where each rank runs: one per rank of a group, on its node and devices, or one per
    bundle of a pool. Raises `DispatchError` without either."""
    if sharing_with is not None:
        facts = [handle.facts for handle in sharing_with._ranks.handles]
        local = local_ranks([fact.node_id for fact in facts])
        return [
            (f"shared:{rank}", local[rank], cls.options_on_node(fact.node_id), devices_of(fact))
            for rank, fact in enumerate(facts)
        ]
    if pool is None:
        raise DispatchError(
            "RayWorkerGroup needs a resource_pool, a group to share with (sharing_with), "
            "or existing workers (worker_names or worker_handles)."
        )
    if detached:
        pool.detach()
    strategy: Strategy = "STRICT_PACK" if bin_pack else "PACK"
    groups = pool.get_placement_groups(strategy, device_name=device_name)
    bundles = pool.bundles_of_ranks()
    local = local_places([(groups[group], bundle) for group, bundle in bundles])
    device = pool.use_gpu, 1 / pool.max_colocate_count, device_name
    return [
        (f"{group}:{bundle}", place, cls.actor_options(groups[group], bundle, *device), {})
        for (group, bundle), place in zip(bundles, local, strict=True)
    ]


@contextmanager
def _killed_after_an_error(started: Sequence[RankHandle]) -> Iterator[None]:
    """End the ranks if the block raises: detached ones would outlive the program."""
    try:
        yield
    except BaseException:
        for handle in started:
            cluster.kill_actor(cast("RankActor", handle.native))
        raise


def _future_of(ref: object) -> DataProtoFuture:
    from quadriga.backends.ray.referenced import ReferencedValue

    assert isinstance(ref, ray.ObjectRef)
    return ReferencedValue([pending_of(ref, "a reference of Ray")])


register_reference(ray.ObjectRef, _future_of)


class RayBackend:
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
        self.store = make_store(store)
        self._session: cluster.RaySession | None = None
        self._pools: list[RayResourcePool] = []

    def start(self, **options: Any) -> None:
        """Connect to Ray (see `ensure_ray`). `shutdown` ends what this started."""
        self._session = cluster.ensure_ray(**options)
        self.store = make_store(self.store)  # what the old one knows of a cluster is forgotten

    def shutdown(self) -> None:
        """Release the pools that were made here, and close the session of `start`.

        The last session of the process also ends the row servers, and Ray if a session started it.
        Pools of detached groups stay: those groups outlive this driver. If one part cannot be
        ended, the others are ended before its error is raised. A cluster that is lost is asked
        nothing: the processes that were started here are killed.
        """
        pools, self._pools = self._pools, []
        if lost := cluster_lost():
            end_own_processes()
        with ExitStack() as stack:  # which calls the last callback first
            if self._session is not None:
                stack.callback(self._session.close, lost=bool(lost))
            if ray.is_initialized() and not lost:
                if cluster.is_last(self._session):
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

    def pool_in_free_room(self, like: ResourcePool) -> RayResourcePool | None:
        """Return a new pool as large as `like`, with its settings, for which the nodes have
        resources that no process holds; None if they have not."""
        assert isinstance(like, RayResourcePool)
        kinds = {name: getattr(like, name) for name in
                 ("use_gpu", "max_colocate_count", "accelerator_type")}  # fmt: skip
        pool = RayResourcePool([like.world_size], **kinds)
        pool.label = f"{like.label}+"
        try:
            check_feasible([pool.needs()], free_nodes())
        except PlacementError:
            return None
        self._pools.append(pool)
        return pool

    def is_placed(self, pool: ResourcePool) -> bool:
        """Return whether all bundles are on living nodes. The bundles of a lost node are on none
        until Ray places them again."""
        assert isinstance(pool, RayResourcePool)
        groups = (group for root in pool.roots() for group in root.pgs or ())
        return all(ray.util.placement_group_table(g)["state"] == "CREATED" for g in groups)

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

    # Calls

    def submit(
        self, ranks: RankSet, targets: Sequence[int], calls: Sequence[Call], timeout: float | None
    ) -> Sequence[Pending]:
        """Submit one actor task per rank, named "role.method"."""
        label = calls[0].label
        handles = [ranks.handles[target] for target in targets]
        if any(map(is_future, (*calls[0].args, *calls[0].kwargs.values()))):
            calls = split_futures(handles, calls)
        fields: list[Sequence[Ref]] = []

        def send(handle: RankHandle, *arguments: object) -> Ref:
            method = handle.methods.get(label)
            if method is None:
                group = cluster.BESIDE if label in handle.facts.beside else None
                method = handle.methods[label] = RayMethod(handle.native, label, group)
            ref, apart = method.send(*arguments)
            fields.append(apart)
            return ref

        refs = send_to_ranks(ranks, handles, calls, send)
        batch = RayBatch(refs, handles, label, ranks, fields, timeout)
        ranks.in_flight.add(batch)
        return [RayPending(batch, i) for i in range(len(refs))]

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return all results. The first failure of any of them is raised as soon as it is known."""
        RayPending.wait_all([p for p in pendings if isinstance(p, RayPending)])
        return [pending.result() for pending in pendings]

    def share(self, packed: object) -> object:
        """Return `packed`, or a reference to it in the store if it is large. Batches are small
        here: their fields are in the store already, and futures are references."""
        if is_plain(packed) or packed_batch(packed) is not None or is_future(packed):
            return packed
        return shared_value(packed)

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return the ranks whose process has ended, with one probe per node."""
        return dead_ranks(handles)

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """Return the error for a rank whose process has ended, with its last lines of output."""
        if not ray.is_initialized():
            return None
        labels = [batch.label for batch in list(ranks.in_flight) if batch.waits_for(handle)]
        idle = f"{'+'.join(ranks.roles)}."
        reason = ranks.broken or "its process has ended"
        return died(handle, labels[0] if labels else idle, reason)

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process at once."""
        ray.kill(handle.native)

    def keepers(self, handles: Sequence[RankHandle]) -> list[Keeper]:
        """Return a keeper for each rank; see `keepers_of`."""
        return [*keepers_of([handle.facts.node_id for handle in handles])]
