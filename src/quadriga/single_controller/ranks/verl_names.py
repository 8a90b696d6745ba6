"""The names that verl's workers use, for members of `Worker` that have a plainer name here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:

    class _Worker(Protocol):
        _siblings: Mapping[str, object]

        @property
        def master_address(self) -> str: ...
        @property
        def master_port(self) -> str: ...
        def _query_collect_info(self, mesh_name: str) -> bool: ...


class VerlWorkerNames:
    """Second names of members of `Worker`. They are part of its public interface."""

    def get_master_addr_port(self: _Worker) -> tuple[str, str]:
        """Return (address, port) of rank 0: `master_address`, `master_port`."""
        return self.master_address, self.master_port

    @property
    def fused_worker_dict(self: _Worker) -> Mapping[str, object]:
        """All roles of this process: role → worker. See `sibling`."""
        return self._siblings

    def get_fused_worker_by_name(self: _Worker, worker_name: str) -> object:
        """Return the worker of another role in this process, None if there is no such role."""
        return self._siblings.get(worker_name)

    def query_collect_info(self: _Worker, mesh_name: str) -> bool:
        """Return whether the result of this rank is collected in a mesh."""
        return self._query_collect_info(mesh_name)
