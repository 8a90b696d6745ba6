"""The local backend: every rank is an object in this process, called in the calling thread.

One rank supports everything, `torch.distributed` of world size 1 included. Several ranks are
called one after the other, so they cannot hold collectives; asking for them raises
CollectiveError. Deadlines do not apply: a call runs in the caller's own thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quadriga.backends.local.store import LocalStore
from quadriga.errors import WorkerDiedError, WorkerError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending
from quadriga.single_controller.class_with_args import ClassWithInitArgs, ColocatedClass
from quadriga.single_controller.environment import environment
from quadriga.single_controller.hosting import RankHost
from quadriga.single_controller.resource_pool import ResourcePool


@dataclass(frozen=True)
class LocalRank:
    """One rank: its workers, and the environment variables they see while they run."""

    host: RankHost
    variables: dict[str, str]

    def invoke(self, call: Call) -> Any:
        with environment(self.variables):
            return self.host.invoke(call)


@dataclass(frozen=True)
class LocalPending:
    """An answer that is here already, or the error instead of it."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class LocalBackend:
    """See the module's docstring."""

    name = "local"

    @cached_property
    def store(self) -> LocalStore:
        """Where batches by reference lie."""
        return LocalStore()

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

    def worker_group(self, pool: ResourcePool, cls: ClassWithInitArgs, **options: Any) -> Any:
        """Build the ranks: a `LocalWorkerGroup`."""
        from quadriga.backends.local.group import LocalWorkerGroup

        return LocalWorkerGroup(pool, cls, backend=self, **options)

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Run each call to its end, rank after rank."""
        answers = []
        for target, call in zip(targets, calls, strict=True):
            rank: LocalRank = ranks.handles[target].native
            try:
                answers.append(LocalPending(rank.invoke(call)))
            except Exception as error:  # raised where the caller waits, as with other engines
                answers.append(LocalPending(error=error))
        return answers

    def gather(self, pendings: Sequence[Pending]) -> list[Any]:
        """The answers in order; the first rank's error is raised."""
        return [pending.result() for pending in pendings]

    def share(self, packed: Any, value: Any) -> Any:
        """Nothing is sent anywhere."""
        return packed

    def is_alive(self, handle: RankHandle) -> bool:
        """A rank lives as long as this process, or until it is killed."""
        return bool(handle.native.host.workers)

    def death(self, handle: RankHandle, label: str) -> WorkerError:
        """The error for a rank that was killed."""
        role, _, method = label.rpartition(".")
        rank = handle.facts.rank
        return WorkerDiedError(
            f"{role} rank {rank} was ended before {method}.", role=role, rank=rank, method=method
        )

    def kill(self, handle: RankHandle) -> None:
        """Drop the rank's workers."""
        handle.native.host.workers.clear()

    def shutdown(self) -> None:
        """Nothing was started."""
