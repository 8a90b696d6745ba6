"""`LocalWorkerGroup`: a worker group whose ranks are objects of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from quadriga.backends.local.calls import LocalCallBackend, LocalRank, rank_of
from quadriga.errors import ConfigError, DispatchError, PlacementError
from quadriga.protocol.storage import use_store
from quadriga.single_controller.backend import RankFacts, RankHandle, RankSet
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.call import check_timeouts
from quadriga.single_controller.placement.resource_pool import ResourcePool
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, roles_of
from quadriga.single_controller.ranks.environment import (
    LOCAL_PORT,
    RankEnvironment,
    ReservedPort,
    WorkerEnv,
    environment,
    variables_of_rank,
)
from quadriga.single_controller.ranks.rank_host import RankHost
from quadriga.single_controller.worker_group import (
    BindingPolicy,
    MethodFactory,
    WorkerGroup,
    bind_all,
)

MACHINE_OPTIONS = (
    "bin_pack", "device_name", "master_port_range", "namespace", "register_center", "start_timeout",
)  # fmt: skip
"""Options of other backends that have no effect in one process."""


class LocalWorkerGroup(WorkerGroup):
    """Build one worker per rank of the pool, in this process."""

    _ports: list[ReservedPort]

    def __init__(
        self,
        resource_pool: ResourcePool | None,
        cls_with_init: ClassWithInitArgs,
        *,
        backend: LocalCallBackend | None = None,
        name_prefix: str | None = None,
        role: str | None = None,
        worker_env: WorkerEnv | None = None,
        timeout: float | None = None,
        detached: bool = False,
        sharing_with: WorkerGroup | None = None,
        method_factory: MethodFactory = BoundMethod,
        binding: BindingPolicy = bind_all,
        **machine_options: object,
    ) -> None:
        """Args:
        resource_pool: one rank per bundle.
        cls_with_init: the worker class with its arguments, or several roles.
        backend: the backend that builds the group.
        name_prefix: start of the names of the ranks.
        role: the name of a class that is one role by itself, in messages.
        worker_env: environment variables that are set while the workers run: the same for all
            ranks, one mapping per rank, or a function of the rank.
        timeout: default deadline of a call in seconds.
        detached: must be False.
        sharing_with: another group, whose bundles are used instead of a pool's.
        method_factory: makes the group's methods.
        binding: which registered methods become attributes of the group.
        machine_options: `MACHINE_OPTIONS`, so that a program may run on either backend.

        Raises `PlacementError` for `detached=True` or a pool of another backend, `ConfigError` for
        an option that no backend has.
        """
        _check_options(machine_options, detached)
        check_timeouts(timeout=timeout)
        local = _local_places(resource_pool, sharing_with)
        backend = backend or LocalCallBackend()
        use_store(backend.store)
        prefix = name_prefix or "local"
        classes = cls_with_init.roles
        if role is not None and not cls_with_init.shares_process:
            classes = {role: cls_with_init}
        role_classes = roles_of({name: member.cls for name, member in classes.items()})
        single = None if cls_with_init.shares_process else next(iter(classes))
        self._bound_names(role_classes, single, binding)  # raises before anything is built
        self._ports = []
        places = self._places(local, prefix)
        variables = [variables_of_rank(worker_env, p.rank, p.world_size) for p in places]
        handles = [
            _build(place, classes, own, prefix)
            for place, own in zip(places, variables, strict=True)
        ]
        ranks = RankSet(backend, handles, role_classes, prefix, timeout)
        super().__init__(ranks, single, method_factory, binding)

    def _places(self, local: Sequence[tuple[int, int]], prefix: str) -> list[RankEnvironment]:
        port = LOCAL_PORT
        if len(local) == 1:
            self._ports.append(ReservedPort.choose())
            port = str(self._ports[0].port)
        return [
            RankEnvironment(rank, len(local), local_rank, local_size, "127.0.0.1", port, prefix)
            for rank, (local_rank, local_size) in enumerate(local)
        ]


def _local_places(
    pool: ResourcePool | None, sharing_with: WorkerGroup | None
) -> list[tuple[int, int]]:
    """Return (local rank, local world size) of each rank."""
    if sharing_with is not None:
        places = [rank_of(handle).host.place for handle in sharing_with._ranks.handles]
        return [(place.local_rank, place.local_world_size) for place in places]
    if pool is None:
        raise DispatchError("A local group needs a resource_pool, or a group to share with.")
    return list(zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True))


def _check_options(given: Mapping[str, object], detached: bool) -> None:
    if detached:
        raise PlacementError(
            "A local group ends with its controller; detached=True needs backend=ray."
        )
    for name in given:
        if name not in MACHINE_OPTIONS:
            raise ConfigError(
                f"A local group has no option {name!r}. It takes name_prefix, role, worker_env, "
                f"timeout, sharing_with, method_factory, binding, and without effect "
                f"{', '.join(MACHINE_OPTIONS)}.",
                key=name,
            )


def _build(
    place: RankEnvironment,
    classes: Mapping[str, ClassWithInitArgs],
    worker_env: dict[str, str],
    prefix: str,
) -> RankHandle:
    node = socket.gethostname()
    host = RankHost(place, node)
    variables = {**worker_env, **place.variables()}
    with environment(variables):
        host.build(classes)
    facts = RankFacts(
        place.rank,
        place.world_size,
        node,
        os.getpid(),
        place.master_address,
        place.master_port,
        prefix,
    )
    name = f"{prefix}{'_'.join(classes)}:{place.rank}"
    return RankHandle(LocalRank(host, variables), name, facts)
