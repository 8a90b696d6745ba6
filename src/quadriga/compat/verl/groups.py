"""verl's classes and functions around worker groups, over ours."""

from __future__ import annotations

import random
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quadriga.backends.ray import RayResourcePool
from quadriga.backends.ray import RayWorkerGroup as OurRayWorkerGroup
from quadriga.backends.ray.health.liveness import node_address
from quadriga.backends.ray.placement.placement_groups import alive_nodes, sort_by_node_address
from quadriga.errors import PlacementError, UnknownNameError
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.placement.feasibility import check_feasible
from quadriga.single_controller.ranks.environment import ReservedPort

sort_placement_group_by_node_ip = sort_by_node_address


@dataclass
class DistRankInfo:
    """Coordinates of a rank."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Sizes of the dimensions."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


class WorkerHelper:
    """Address and free port of this process's machine."""

    @staticmethod
    def _get_node_ip() -> str:
        return node_address()

    @staticmethod
    def _get_free_port() -> int:
        reserved = ReservedPort.choose()
        reserved.release()
        return reserved.port

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """(address, free port)."""
        return self._get_node_ip(), str(self._get_free_port())

    get_availale_master_addr_port = get_available_master_addr_port


def get_random_string(length: int) -> str:
    """Letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=length))


def get_master_addr_port(master_port_range: Sequence[int] | None = None) -> tuple[str, str]:
    """(address, free port) of this machine; `master_port_range`: (first, last + 1)."""
    reserved = ReservedPort.choose(master_port_range)
    reserved.release()
    return node_address(), str(reserved.port)


WITHOUT_EFFECT = ("profile_steps", "worker_nsight_options", "use_gpu", "master_addr")


class RayWorkerGroup(OurRayWorkerGroup):
    """Takes verl's keywords, and hands out Ray's own references where verl does.

    `master_port` asks for that one port. `profile_steps`, `worker_nsight_options`, `master_addr`
    and the register center's time-out have no effect.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: Any = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: int = 300,
        **kwargs: Any,
    ) -> None:
        for without_effect in WITHOUT_EFFECT:
            kwargs.pop(without_effect, None)
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

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As the group's own, giving Ray object references."""
        return [pending.ref for pending in super().execute_all_async(method_name, *args, **kwargs)]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As the group's own."""
        return self._wait(super().execute_all_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As the group's own, giving a Ray object reference."""
        return super().execute_rank_zero_async(method_name, *args, **kwargs).ref

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """As the group's own."""
        return self._wait([super().execute_rank_zero_async(method_name, *args, **kwargs)])[0]


def func_generator(
    self: Any,
    method_name: str,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Any:
    """The bound method of that name: splitting, running and joining are its own business."""
    method = getattr(self, method_name)
    if not isinstance(method, BoundMethod):
        raise UnknownNameError(f"{method_name!r} is no registered method of {self}.")
    return method if blocking else method.submit


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role."""

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[Any, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make every pool. Raises PlacementError unless all fit on the nodes together."""
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

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks over all pools."""
        return sum(map(sum, self.resource_pool_spec.values()))


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool],
    src_role_names: Sequence[str],
    resource_pool: RayResourcePool,
) -> list[Any]:
    """Placement groups of existing pools, one for each node of `resource_pool`, largest first.

    Raises PlacementError if they do not suffice.
    """
    found = [
        group
        for name, pool in resource_pools.items()
        if name in src_role_names
        for group in pool.get_placement_groups()
    ]
    found.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda pair: pair[1], reverse=True)
    chosen: dict[int, Any] = {}
    for (index, count), group in zip(wanted, found, strict=False):
        if count <= group.bundle_count:
            chosen[index] = group
    if len(chosen) < len(wanted):
        raise PlacementError(
            f"The pools of {list(src_role_names)} have {[g.bundle_count for g in found]} places, "
            f"{resource_pool!r} wants {resource_pool.store}.",
            wanted=resource_pool.store,
        )
    return [chosen[index] for index in range(len(wanted))]


def check_workers_alive(
    workers: Sequence[Any], is_alive: Callable[[Any], bool], gap_time: float = 1.0
) -> None:
    """Look every `gap_time` seconds; interrupts the main thread when a worker is gone."""
    import _thread

    while all(map(is_alive, workers)):
        time.sleep(gap_time)
    if threading.main_thread().is_alive():
        _thread.interrupt_main()
