"""Calls of worker methods by name that return Ray's object references, as verl's groups do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from quadriga.backends.ray import RayWorkerGroup
from quadriga.backends.ray.programs import actor_method, stored, values_of
from quadriga.backends.ray.submission import submit_values
from quadriga.errors import WorkerDiedError
from quadriga.protocol import DataProto
from quadriga.single_controller.bound_method import Part, build_calls
from quadriga.single_controller.dispatch import registered_methods

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref


class GroupOfReferences(RayWorkerGroup):
    """A worker group whose calls by name return references where Quadriga returns `Pending`s."""

    def _replaces(self, *names: str) -> bool:
        """Return whether a subclass has replaced one of these methods."""
        return any(getattr(type(self), f) is not getattr(GroupOfReferences, f) for f in names)

    def _call_ranks(
        self, targets: Sequence[int], method_name: str, parts: Sequence[Part]
    ) -> list[object]:
        """Call any method of some ranks with the arguments of each, all packed before one is sent.

        A class that replaces `_execute_remote_single_worker` is asked once for each rank.
        """
        name = "_execute_remote_single_worker"
        if self._replaces(name):
            return [
                self._execute_remote_single_worker(self.workers[rank], method_name, *args, **kwargs)
                for rank, (args, kwargs) in zip(targets, parts, strict=True)
            ]
        return list(self._submit(targets, method_name, parts))

    def _execute_remote_single_worker(
        self, worker: object, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call any method of one worker. Return a Ray object reference to its value."""
        rank = next((r for r, known in enumerate(self.workers) if known is worker), None)
        if rank is None:
            self._role_and_method(method_name)  # raises for a method that no role has
            return actor_method(worker, method_name)(*args, **kwargs)
        return self._submit([rank], method_name, [(args, kwargs)])[0]

    def _submit(
        self, targets: Sequence[int], method_name: str, parts: Sequence[Part]
    ) -> Sequence[object]:
        role, name = self._role_and_method(method_name)
        ranks = self._ranks
        if ranks.broken:
            label = f"{role}.{name}"
            raise WorkerDiedError(f"{label} cannot be called: {ranks.broken}", method=label)
        record = registered_methods(ranks.roles[role]).get(name)
        materialize = record is None or record.materialize_futures
        calls = build_calls(ranks, targets, role, name, parts, materialize)
        return submit_values(ranks, targets, calls)

    def execute_all_async(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> list[object]:
        """Call any method by name on every rank. Return one Ray object reference per rank.

        If every argument is a list of world_size length, rank i receives entry i of each.
        """
        n = self.world_size
        given = (*args, *kwargs.values())
        if all(isinstance(value, list) and len(value) == n for value in given):
            parts = [
                (
                    tuple(_entry(value, i) for value in args),
                    {name: _entry(value, i) for name, value in kwargs.items()},
                )
                for i in range(n)
            ]
        else:
            # A batch is stored once, whatever the number of ranks that receive it.
            once = {id(v): stored(v) for v in given if isinstance(v, DataProto) and n > 1}
            same_args = tuple(once.get(id(value), value) for value in args)
            parts = [(same_args, {k: once.get(id(v), v) for k, v in kwargs.items()})] * n
        return self._call_ranks(range(n), method_name, parts)

    def execute_rank_zero_async(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call any method by name on rank 0. Return a Ray object reference."""
        return self._execute_remote_single_worker(self.workers[0], method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: object, **kwargs: object) -> list[object]:
        """Call any method by name on every rank, through `execute_all_async`. Return its values."""
        if self._replaces("execute_all_async", "_execute_remote_single_worker"):
            refs = cast("list[Ref]", self.execute_all_async(method_name, *args, **kwargs))
            return values_of(refs, self._ranks.timeout, method_name)
        return super().execute_all_sync(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call any method by name on rank 0, through `execute_rank_zero_async`."""
        if self._replaces("execute_rank_zero_async", "_execute_remote_single_worker"):
            ref = cast("Ref", self.execute_rank_zero_async(method_name, *args, **kwargs))
            return values_of([ref], self._ranks.timeout, method_name)[0]
        return super().execute_rank_zero_sync(method_name, *args, **kwargs)

    def execute_all(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> list[object]:
        """Call `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero(  # type: ignore[override]  # see the class
        self, method_name: str, *args: object, **kwargs: object
    ) -> object:
        """Call `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)


def _entry(value: object, index: int) -> object:
    return value[index] if isinstance(value, list) else value
