"""The Ray backend: ranks are actors, calls are actor tasks, batches by reference are objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayTaskError

from quadriga.backends.ray.class_with_args import RayClassWithInitArgs, RayColocatedClass
from quadriga.backends.ray.cluster import RaySession, ensure_ray
from quadriga.backends.ray.failures import died
from quadriga.backends.ray.liveness import rank_alive
from quadriga.backends.ray.placing import alive_nodes
from quadriga.backends.ray.pool import RayResourcePool
from quadriga.backends.ray.sharing import share
from quadriga.backends.ray.store import RayStore
from quadriga.backends.ray.waiting import RayBatch
from quadriga.errors import QuadrigaError, WorkerError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending
from quadriga.single_controller.class_with_args import ClassWithInitArgs
from quadriga.single_controller.placement import check_feasible
from quadriga.single_controller.resource_pool import ResourcePool

_ATOMS = (int, float, bool, type(None))


class RayPending:
    """One rank's answer. Where the call was made it knows its peers, so that a failure of any
    of them ends the wait; when it travels, only the reference does."""

    __slots__ = ("batch", "index", "ref")

    def __init__(self, ref: Any, batch: RayBatch | None = None, index: int = 0) -> None:
        self.ref = ref
        self.batch = batch
        self.index = index

    def result(self) -> Any:
        """Wait for the value; raises what the worker raised."""
        if self.batch is not None:
            return self.batch.gather()[self.index]
        return _value(self.ref)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayPending, (self.ref,)


def _is_plain(call: Call) -> bool:
    """Whether a call holds nothing but numbers and short strings: it is then pickled once for all
    ranks, where Ray would do it once for each and look for references inside."""
    return all(
        type(value) in _ATOMS or (type(value) is str and len(value) < 1000)
        for value in (*call.args, *call.kwargs.values())
    )


def _value(ref: Any) -> Any:
    """A value that another process asked for; this process knows nothing of the rank."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, QuadrigaError):
            raise error.cause from error
        raise


class RayBackend:
    """See `quadriga.single_controller.backend.Backend`."""

    name = "ray"

    def __init__(self) -> None:
        self._session: RaySession | None = None
        self._pools: list[RayResourcePool] = []

    @cached_property
    def store(self) -> RayStore:
        """Ray's object store."""
        return RayStore()

    def start(self, **options: Any) -> None:
        """Connect to Ray (see `ensure_ray`); `shutdown` ends what this started."""
        self._session = ensure_ray(**options)

    def shutdown(self) -> None:
        """Give back the places of the pools made here, and end Ray if `start` started it."""
        if ray.is_initialized():
            for pool in self._pools:
                pool.release()
        self._pools.clear()
        if self._session is not None:
            self._session.close()

    def resource_pool(
        self, process_on_nodes: Sequence[int], name: str | None = None, **options: Any
    ) -> RayResourcePool:
        """A `RayResourcePool` of this backend, for one group unless `max_colocate_count` says
        more. `shutdown` gives its places back."""
        options.setdefault("max_colocate_count", 1)
        pool = RayResourcePool(process_on_nodes, **options)
        pool.label = name or pool.label
        self._pools.append(pool)
        return pool

    def check_placement(self, pools: Iterable[ResourcePool]) -> None:
        """Raises PlacementError, naming a pool and what it lacks, unless all pools fit on the
        nodes of the cluster together. The first of them that is used places all."""
        ours = tuple(pool for pool in pools if isinstance(pool, RayResourcePool))
        check_feasible([pool.needs() for pool in ours], alive_nodes())
        for pool in ours:
            pool.placed_together = ours

    def class_with_args(self, cls: type, *args: Any, **kwargs: Any) -> RayClassWithInitArgs:
        """A `RayClassWithInitArgs`."""
        return RayClassWithInitArgs(cls, *args, **kwargs)

    def colocate(self, classes: Mapping[str, ClassWithInitArgs]) -> RayColocatedClass:
        """Several roles in one process."""
        return RayColocatedClass(dict(classes))

    def worker_group(self, pool: ResourcePool, cls: ClassWithInitArgs, **options: Any) -> Any:
        """Start a `RayWorkerGroup`."""
        from quadriga.backends.ray.group import RayWorkerGroup

        return RayWorkerGroup(pool, cls, backend=self, **options)

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """One actor task per rank, named "role.method"."""
        label = f"{calls[0].role}.{calls[0].method}"
        handles = [ranks.handles[target] for target in targets]
        refs = []
        packed: dict[int, Call | bytes] = {}
        for handle, call in zip(handles, calls, strict=True):
            key = id(call)
            if key not in packed:
                packed[key] = pickle.dumps(call) if _is_plain(call) else call
            invoke = handle.methods.get(label)
            if invoke is None:
                invoke = handle.native.quadriga_invoke.options(name=label)
                handle.methods[label] = invoke
            refs.append(invoke.remote(packed[key]))
        batch = RayBatch(refs, handles, label, timeout, ranks)
        return [RayPending(ref, batch, index) for index, ref in enumerate(refs)]

    def gather(self, pendings: Sequence[Pending]) -> list[Any]:
        """All answers of one submission; the first failure is raised as soon as it is known."""
        batches = {id(p.batch): p.batch for p in pendings if isinstance(p, RayPending)}
        values = {key: batch.gather() for key, batch in batches.items() if batch}
        return [
            values[id(p.batch)][p.index] if isinstance(p, RayPending) and p.batch else p.result()
            for p in pendings
        ]

    def share(self, packed: Any, value: Any) -> Any:
        """What is packed, stored once if it is big."""
        return share(packed, value)

    def is_alive(self, handle: RankHandle) -> bool:
        """Whether Ray knows of no death and the rank's node answers."""
        return rank_alive(handle)

    def death(self, handle: RankHandle, label: str) -> WorkerError:
        """The error for a rank that is gone, with what it wrote last."""
        return died(handle, label, "its process is gone")

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process at once."""
        ray.kill(handle.native)
