"""The local backend: every rank is an object in this process, called in the calling thread.

One rank supports everything, `torch.distributed` of world size 1 included. Several ranks are
called one after the other, so they cannot hold collectives; asking for them raises
CollectiveError. A call cannot be cut short: one that passes its deadline is spoken of at that
moment and raises CallTimeoutError when it comes back (`deadlines`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quadriga.backends.local.calls import LocalCallBackend
from quadriga.backends.local.group import LocalWorkerGroup
from quadriga.single_controller.placement.resource_pool import ResourcePool
from quadriga.single_controller.ranks.class_with_args import ClassWithInitArgs, ColocatedClass


class LocalBackend(LocalCallBackend):
    """See the module's docstring."""

    name = "local"

    def start(self, **options: Any) -> None:
        """Nothing to start."""

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> ResourcePool:
        """A pool; options that only an engine with machines understands are left out."""
        return ResourcePool(process_on_nodes, options.get("max_colocate_count", 1))

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Objects of one process always fit."""

    def class_with_args(self, cls: type, *args: Any, **kwargs: Any) -> ClassWithInitArgs:
        """A worker class with its arguments."""
        return ClassWithInitArgs(cls, *args, **kwargs)

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> ColocatedClass:
        """Several roles in one process."""
        return ColocatedClass(dict(classes))

    def worker_group(
        self, pool: ResourcePool | None, cls: ClassWithInitArgs, **options: Any
    ) -> Any:
        """Build the ranks: a `LocalWorkerGroup`."""
        return LocalWorkerGroup(pool, cls, backend=self, **options)

    def shutdown(self) -> None:
        """Nothing was started."""
