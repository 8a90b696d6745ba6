"""`LocalWorkerGroup`: a worker group whose ranks are objects of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from quadriga.backends.local.backend import LocalBackend, LocalRank
from quadriga.errors import PlacementError
from quadriga.protocol.reference import use_store
from quadriga.single_controller.backend import RankFacts, RankHandle, RankSet
from quadriga.single_controller.bound_method import BoundMethod
from quadriga.single_controller.class_with_args import ClassWithInitArgs
from quadriga.single_controller.environment import (
    LOCAL_PORT,
    RankEnvironment,
    ReservedPort,
    environment,
)
from quadriga.single_controller.hosting import RankHost
from quadriga.single_controller.resource_pool import ResourcePool
from quadriga.single_controller.worker_group import MethodFactory, WorkerGroup, roles_of


class LocalWorkerGroup(WorkerGroup):
    """Builds one worker per rank of the pool, here.

    Options that concern machines (`bin_pack`, `device_name`) are accepted and have no effect, so
    that a program may run on either backend; `detached=True` raises PlacementError.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        cls_with_init: ClassWithInitArgs,
        *,
        backend: LocalBackend | None = None,
        name_prefix: str | None = None,
        role: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        detached: bool = False,
        method_factory: MethodFactory = BoundMethod,
        **_machine_options: Any,
    ) -> None:
        if detached:
            raise PlacementError(
                "A local group lives and dies with its controller; detached=True needs backend=ray."
            )
        backend = backend or LocalBackend()
        use_store(backend.store)
        prefix = name_prefix or "local"
        classes = cls_with_init.roles
        if role is not None and not cls_with_init.shares_process:
            classes = {role: cls_with_init}
        self._ports: list[ReservedPort] = []
        places = self._places(resource_pool, prefix)
        handles = [_build(place, classes, dict(worker_env or {}), prefix) for place in places]
        ranks = RankSet(
            backend,
            handles,
            roles_of({name: member.cls for name, member in classes.items()}),
            prefix,
            timeout,
        )
        single = None if cls_with_init.shares_process else next(iter(classes))
        super().__init__(ranks, single, method_factory)

    def _places(self, pool: ResourcePool, prefix: str) -> list[RankEnvironment]:
        world_size = pool.world_size
        port = LOCAL_PORT
        if world_size == 1:
            self._ports.append(ReservedPort.choose())
            port = str(self._ports[0].port)
        return [
            RankEnvironment(rank, world_size, local_rank, local_size, "127.0.0.1", port, prefix)
            for rank, (local_rank, local_size) in enumerate(
                zip(pool.local_rank_list(), pool.local_world_size_list(), strict=True)
            )
        ]


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
