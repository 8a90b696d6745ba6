"""The names that verl's worker groups use, for methods that have a plainer name here.

These names are part of the public interface of every group, because programs for verl call them.
`WorkerGroup` and `NamedCalls` define the methods; nothing in this package calls a name below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from quadriga.single_controller.named_calls import NamedCalls

if TYPE_CHECKING:
    from typing import Protocol

    class _Group(Protocol):
        @property
        def workers(self) -> list[object]: ...
        def is_alive(self, rank: int) -> bool: ...
        def wait_until_alive(self, timeout: float = 300.0) -> None: ...


class VerlNames(NamedCalls):
    """`execute_all`, `_is_worker_alive` and others: second names of methods of `WorkerGroup`."""

    execute_all = execute_all_async = NamedCalls.call_all_async
    execute_all_sync = NamedCalls.call_all
    execute_rank_zero = execute_rank_zero_async = NamedCalls.call_rank_zero_async
    execute_rank_zero_sync = NamedCalls.call_rank_zero

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, object]:
        """Return one view per role of a fused class. The same as `spawn`."""
        return self.spawn(prefix_set)  # type: ignore[attr-defined, no-any-return]  # WorkerGroup's

    def __iter__(self: _Group) -> Iterator[object]:
        """Iterate over `workers`."""
        return iter(self.workers)

    def _is_worker_alive(self: _Group, worker: object) -> bool:
        """Return whether the process of a rank exists. `worker`: an entry of `workers`."""
        return any(w is worker and self.is_alive(rank) for rank, w in enumerate(self.workers))

    def _block_until_all_workers_alive(self: _Group, timeout: float = 300.0) -> None:
        """Wait until every rank is alive. Raises `WorkerDiedError` after `timeout` seconds."""
        self.wait_until_alive(timeout)
