"""verl's classes and functions for worker groups, resource pools and ports."""

from __future__ import annotations

import random
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from quadriga.backends.ray import RayResourcePool
from quadriga.backends.ray import RayWorkerGroup as QuadrigaRayWorkerGroup
from quadriga.backends.ray.cluster import node_address
from quadriga.backends.ray.placement.placement_groups import alive_nodes, sort_by_node_address
from quadriga.errors import PlacementError, UnknownNameError
from quadriga.single_controller import ClassWithInitArgs, WorkerGroup
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.call import Pending
from quadriga.single_controller.placement.feasibility import check_feasible
from quadriga.single_controller.ranks.environment import ReservedPort

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor

RoleT = TypeVar("RoleT")
WorkerT = TypeVar("WorkerT")

sort_placement_group_by_node_ip = sort_by_node_address


class PlacementGroup(Protocol):
    """The attribute of Ray's placement groups that is used here."""

    @property
    def bundle_count(self) -> int: ...


class WorkerHelper:
    """Address of this node, and a port that is free on it."""

    @staticmethod
    def _get_node_ip() -> str:
        return node_address()

    @staticmethod
    def _get_free_port() -> int:
        reserved = ReservedPort.choose()
        reserved.release()
        return reserved.port

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return (address of this node, free port)."""
        return self._get_node_ip(), str(self._get_free_port())

    get_availale_master_addr_port = get_available_master_addr_port  # verl's spelling


def get_random_string(length: int) -> str:
    """Return a random string of letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=length))


def get_master_addr_port(master_port_range: Sequence[int] | None = None) -> tuple[str, str]:
    """Return (address of this node, free port).

    `master_port_range`: (first, last + 1), the ports to choose from; None: any port. Raises
    `PlacementError` if none of them is free.
    """
    reserved = ReservedPort.choose(master_port_range)
    reserved.release()
    return node_address(), str(reserved.port)


IGNORED_OPTIONS = ("profile_steps", "worker_nsight_options", "use_gpu", "master_addr")


class RayWorkerGroup(QuadrigaRayWorkerGroup):
    """A Ray worker group that accepts verl's keywords and returns Ray's object references.

    `master_port` asks rank 0 to use that port. `profile_steps`, `worker_nsight_options`,
    `use_gpu`, `master_addr` and `ray_wait_register_center_timeout` are accepted and ignored.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: ClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[RankActor] | None = None,
        ray_wait_register_center_timeout: int = 300,
        **kwargs: Any,
    ) -> None:
        for option in IGNORED_OPTIONS:
            kwargs.pop(option, None)
        # Rank 0 chooses a port of a range; a range of one port fixes it.
        port = kwargs.pop("master_port", None)
        if port is not None:
            kwargs["master_port_range"] = (int(port), int(port) + 1)
        super().__init__(
            resource_pool,
            ray_cls_with_init,
            bin_pack,
            name_prefix,
            detached,
            worker_names,
            worker_handles,
            **kwargs,
        )

    # verl returns Ray's object references where Quadriga returns `Pending` objects.

    def execute_all_async(  # type: ignore[override]  # see above
        self, method_name: str, *args: object, **kwargs: object
    ) -> list[object]:
        """Call any method by name on every rank. Return one Ray object reference per rank."""
        return [_reference(p) for p in self.call_all_async(method_name, *args, **kwargs)]

    def execute_rank_zero_async(  # type: ignore[override]  # see above
        self, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call any method by name on rank 0. Return a Ray object reference."""
        return _reference(self.call_rank_zero_async(method_name, *args, **kwargs))

    execute_all = execute_all_async  # type: ignore[assignment]  # see above
    execute_rank_zero = execute_rank_zero_async  # type: ignore[assignment]  # see above


@runtime_checkable
class _RayPending(Protocol):
    """A `Pending` of the Ray backend."""

    ref: object
    """Ray's object reference."""


def _reference(pending: Pending) -> object:
    if not isinstance(pending, _RayPending):
        raise TypeError(f"expected a Pending of the Ray backend, got {type(pending).__name__}")
    return pending.ref


def func_generator(
    self: WorkerGroup,
    method_name: str,
    dispatch_fn: Callable[..., object],
    collect_fn: Callable[..., object],
    execute_fn: Callable[..., object],
    blocking: bool,
) -> Callable[..., object]:
    """Return the group's method of that name, or its `submit` if `blocking` is false.

    The three functions are ignored: the method dispatches, runs and collects by its own record.
    Raises `UnknownNameError` if the group has no such method.
    """
    method: object = getattr(self, method_name)
    if not isinstance(method, BoundMethod):
        raise UnknownNameError(
            f"{method_name!r} is not a registered method of {self}. Mark it with @register."
        )
    return method if blocking else method.submit


@dataclass
class ResourcePoolManager(Generic[RoleT]):
    """Create resource pools by name, and find the pool of a role.

    `resource_pool_spec`: pool name → ranks per node. `mapping`: role → pool name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[RoleT, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create every pool.

        Raises `PlacementError` unless all fit on the nodes at the same time.
        """
        pools = {
            name: RayResourcePool(
                ranks,
                use_gpu=True,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
            )
            for name, ranks in self.resource_pool_spec.items()
        }
        check_feasible([pool.needs() for pool in pools.values()], alive_nodes())
        self.resource_pool_dict.update(pools)

    def get_resource_pool(self, role: RoleT) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of ranks in all pools."""
        return sum(map(sum, self.resource_pool_spec.values()))


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool],
    src_role_names: Sequence[str],
    resource_pool: RayResourcePool,
) -> list[PlacementGroup]:
    """Choose placement groups of existing pools, one for each node of `resource_pool`.

    Only pools of `src_role_names` are considered. Raises `PlacementError` if their placement groups
    do not have enough bundles.
    """
    # Largest first: resource_pool.store [1, 3] with groups of 4 and 2 bundles gives node 1
    # (3 ranks) the group of 4, then node 0 (1 rank) the group of 2; returned in node order.
    found = [
        group
        for name, pool in resource_pools.items()
        if name in src_role_names
        for group in pool.get_placement_groups()
    ]
    found.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda pair: pair[1], reverse=True)
    chosen: dict[int, PlacementGroup] = {}
    for (index, count), group in zip(wanted, found, strict=False):
        if count <= group.bundle_count:
            chosen[index] = group
    if len(chosen) < len(wanted):
        raise PlacementError(
            f"{resource_pool!r} needs placement groups with {resource_pool.store} bundles; those "
            f"of {list(src_role_names)} have {[g.bundle_count for g in found]}. Use larger pools.",
            wanted=resource_pool.store,
        )
    return [chosen[index] for index in range(len(wanted))]


def check_workers_alive(
    workers: Sequence[WorkerT], is_alive: Callable[[WorkerT], bool], gap_time: float = 1.0
) -> None:
    """Check every `gap_time` seconds. Interrupt the main thread once a worker is not alive."""
    import _thread

    # verl calls this in a thread. Only the main thread can be interrupted from another one.
    while all(map(is_alive, workers)):
        time.sleep(gap_time)
    if threading.main_thread().is_alive():
        _thread.interrupt_main()
