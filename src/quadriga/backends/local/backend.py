"""The local backend: every rank is an object of this process, called in the calling thread.

One rank supports everything, `torch.distributed` with a world size of 1 included. Several ranks are
called one after the other, so they cannot run collectives: asking for one raises CollectiveError. A
call cannot be interrupted: one that exceeds its deadline is logged at that moment, and raises
CallTimeoutError when it returns (see `deadlines`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quadriga.backends.local.calls import LocalCallBackend
from quadriga.backends.local.group import LocalWorkerGroup
from quadriga.single_controller.placement.resource_pool import ResourcePool
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, ColocatedClass


class LocalBackend(LocalCallBackend):
    """Implement `quadriga.single_controller.backend.Backend` in one process."""

    name = "local"

    def start(self, **options: object) -> None:
        """Do nothing: there is nothing to start."""

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> ResourcePool:
        """Return a pool. Options of machines (`use_gpu`, …) have no effect."""
        return ResourcePool(process_on_nodes, options.get("max_colocate_count", 1))

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Do nothing: objects of one process always fit."""

    def class_with_args(self, cls: type, *args: object, **kwargs: object) -> ClassWithInitArgs:
        """Return a worker class with its arguments."""
        return ClassWithInitArgs(cls, *args, **kwargs)

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> ColocatedClass:
        """Return several roles that share one process."""
        return ColocatedClass(dict(classes))

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: Any
    ) -> LocalWorkerGroup:
        """Build the ranks of a `LocalWorkerGroup`."""
        return LocalWorkerGroup(pool, cls, backend=self, **options)

    def shutdown(self) -> None:
        """Do nothing: nothing was started."""
