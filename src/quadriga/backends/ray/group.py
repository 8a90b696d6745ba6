"""`RayWorkerGroup`: a worker group whose ranks are Ray actors."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from quadriga.backends.ray.calls.submission import RayCallBackend
from quadriga.backends.ray.placement.class_with_args import RayClassWithInitArgs
from quadriga.backends.ray.placement.placement_groups import local_places
from quadriga.backends.ray.placement.pool import RayResourcePool
from quadriga.backends.ray.process.register_center import start_register_center
from quadriga.backends.ray.process.start import RankPlan, class_roles, devices_of, start_ranks
from quadriga.errors import DispatchError, WorkerDiedError
from quadriga.protocol.values.storage import use_store
from quadriga.single_controller.backend import RankFacts, RankHandle, RankSet
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs
from quadriga.single_controller.ranks.environment import RankEnvironment
from quadriga.single_controller.worker_group import MethodFactory, WorkerGroup

START_TIMEOUT_S = 1800.0
ATTACH_TIMEOUT_S = 60.0


class RayWorkerGroup(WorkerGroup):
    """Starts one actor per rank of the pool, or takes over actors that exist.

    `role`: what messages call a class that is one role by itself. `worker_env`: environment
    variables of each process, set before the worker's modules load. `timeout`: default deadline
    of a call in seconds. `start_timeout`: seconds for all `__init__`s. `bin_pack`: STRICT_PACK,
    else PACK. `sharing_with`: another group of the same size; rank i runs on the node and the
    devices of its rank i, and no pool is needed. `register_center`: also start an actor named
    `{prefix}_register_center` that tells rank 0's address to whoever asks (see that module).
    `master_port_range`: (first, last + 1), where rank 0 may choose its port, for firewalls.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        device_name: str = "cuda",
        worker_env: Mapping[str, str] | None = None,
        *,
        role: str | None = None,
        timeout: float | None = None,
        start_timeout: float = START_TIMEOUT_S,
        sharing_with: WorkerGroup | None = None,
        namespace: str | None = None,
        register_center: bool = False,
        master_port_range: Sequence[int] | None = None,
        backend: RayCallBackend | None = None,
        method_factory: MethodFactory = BoundMethod,
    ) -> None:
        backend = backend or RayCallBackend()
        use_store(backend.store)
        if ray_cls_with_init is None:
            raise DispatchError("RayWorkerGroup needs ray_cls_with_init, to know the methods.")
        cls = ray_cls_with_init
        roles = cls.roles
        if role is not None and not cls.shares_process:
            roles = {role: cls}
        self.resource_pool = resource_pool
        if worker_names is not None or worker_handles is not None:
            handles = _attach(worker_names, worker_handles, namespace)
            prefix = name_prefix or handles[0].facts.group_prefix
        else:
            prefix = name_prefix or uuid.uuid4().hex[:6]
            planner = _Planner(cls, prefix, detached, worker_env or {}, device_name, namespace)
            if sharing_with is not None:
                plans = planner.beside(sharing_with)
            elif resource_pool is not None:
                plans = planner.in_pool(resource_pool, "STRICT_PACK" if bin_pack else "PACK")
            else:
                raise DispatchError(
                    "RayWorkerGroup needs a resource_pool, a group to share with (sharing_with), "
                    "or existing workers (worker_names or worker_handles)."
                )
            handles = start_ranks(
                plans, roles, cls.cls.__name__, start_timeout, port_range=master_port_range
            )
            if register_center:
                facts = [handle.facts for handle in handles]
                self.register_center = start_register_center(prefix, facts, detached, namespace)
        ranks = RankSet(backend, handles, class_roles(roles), prefix, timeout)
        single = None if cls.shares_process else next(iter(roles))
        super().__init__(ranks, single, method_factory)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Take over ranks that another program started, by their names or handles.

        Raises WorkerDiedError if one of them does not exist.
        """
        return cls(
            None,
            ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )


class _Planner:
    """Says for each rank its name, place and Ray options."""

    def __init__(
        self,
        cls: ClassWithInitArgs,
        prefix: str,
        detached: bool,
        worker_env: Mapping[str, str],
        device_name: str,
        namespace: str | None,
    ) -> None:
        self.cls = cls if isinstance(cls, RayClassWithInitArgs) else _as_ray(cls)
        self.prefix = prefix
        self.worker_env = dict(worker_env)
        self.device_name = device_name
        self.lifetime: dict[str, Any] = {"lifetime": "detached"} if detached else {}
        if namespace is not None:
            self.lifetime["namespace"] = namespace

    def in_pool(self, pool: RayResourcePool, strategy: str) -> list[RankPlan]:
        """One plan per place of the pool."""
        groups = pool.get_placement_groups(strategy, device_name=self.device_name)
        bundles = [pool.bundle_of_rank(rank) for rank in range(pool.world_size)]
        local = local_places([(groups[group], bundle) for group, bundle in bundles])
        plans = []
        for rank, (group, bundle) in enumerate(bundles):
            options = self.cls.actor_options(
                groups[group],
                bundle,
                use_gpu=pool.use_gpu,
                num_gpus=1 / pool.max_colocate_count,
                device_name=self.device_name,
            )
            place = self._place(rank, pool.world_size, *local[rank])
            plans.append(self._plan(place, f"{group}:{bundle}", options, {}))
        return plans

    def beside(self, other: WorkerGroup) -> list[RankPlan]:
        """One plan per rank of another group: same node, same devices."""
        actors = other.workers
        facts = [handle.facts for handle in other._ranks.handles]
        nodes = [fact.node_id for fact in facts]
        plans = []
        for rank, actor in enumerate(actors):
            local_rank = nodes[:rank].count(nodes[rank])
            place = self._place(rank, len(actors), local_rank, nodes.count(nodes[rank]))
            options = self.cls.actor_options(sharing_with=actor)
            plans.append(self._plan(place, f"shared:{rank}", options, devices_of(facts[rank])))
        return plans

    def _place(self, rank: int, world: int, local_rank: int, local_size: int) -> RankEnvironment:
        return RankEnvironment(rank, world, local_rank, local_size, group_prefix=self.prefix)

    def _plan(
        self, place: RankEnvironment, suffix: str, options: dict[str, Any], own: dict[str, str]
    ) -> RankPlan:
        name = f"{self.prefix}{self.cls.cls.__name__}_{suffix}"
        return RankPlan(name, place, {**options, **self.lifetime}, {**self.worker_env, **own})


def _as_ray(cls: ClassWithInitArgs) -> RayClassWithInitArgs:
    return RayClassWithInitArgs(cls.cls, *cls.args, **cls.kwargs)


def _attach(
    names: Sequence[str] | None, actors: Sequence[Any] | None, namespace: str | None
) -> list[RankHandle]:
    """Handles of ranks that exist, in the order of their ranks."""
    if actors is None:
        actors = []
        for name in names or []:
            try:
                actors.append(ray.get_actor(name, namespace=namespace))
            except ValueError as error:
                raise WorkerDiedError(
                    f"No worker named {name!r} lives in the Ray namespace "
                    f"{namespace or ray.get_runtime_context().namespace!r}.",
                    rank=len(actors),
                ) from error
    try:
        facts: list[RankFacts] = ray.get(
            [actor.quadriga_facts.remote() for actor in actors], timeout=ATTACH_TIMEOUT_S
        )
    except ray.exceptions.RayActorError as error:
        raise WorkerDiedError(f"A worker of the detached group is gone: {error}") from error
    handles = [
        RankHandle(actor, fact.name, fact) for actor, fact in zip(actors, facts, strict=True)
    ]
    return sorted(handles, key=lambda handle: handle.facts.rank)
