"""The names that verl's workers use, for members of `Worker` that have a plainer name here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from quadriga.errors import UnregisteredMethodError
from quadriga.single_controller.environment import VISIBLE, RankEnvironment

if TYPE_CHECKING:

    class _Worker(Protocol):
        _environment: RankEnvironment

        @property
        def master_address(self) -> str: ...
        @property
        def master_port(self) -> str: ...
        def _query_collect_info(self, mesh_name: str) -> bool: ...
        @classmethod
        def env_keys(cls) -> list[str]: ...


class OfEnvironment:
    """An attribute of the rank's environment. A worker may assign another value to its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, worker: _Worker | None, owner: type) -> object:
        return self if worker is None else getattr(worker._environment, self._name)


class VerlWorkerNames:
    """Second names of members of `Worker`. They are part of its public interface."""

    _rank = OfEnvironment("rank")
    _world_size = OfEnvironment("world_size")
    _local_rank = OfEnvironment("local_rank")
    _local_world_size = OfEnvironment("local_world_size")
    _master_addr = OfEnvironment("master_address")
    _master_port = OfEnvironment("master_port")

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the environment variables that `_configure_with_store` sets."""
        return [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            VISIBLE[0],
        ]

    def _configure_with_store(self: _Worker, store: Mapping[str, object]) -> None:
        """Set the variables of `env_keys` that `store` has, and read the position again.

        A variable has the key `_<name in lower case>`, for example `_world_size`.
        """
        for name in self.env_keys():
            value = store.get(f"_{name.lower()}")
            if value is not None:
                os.environ[name] = str(value)
        self._environment = RankEnvironment.read()

    def get_master_addr_port(self: _Worker) -> tuple[str, str]:
        """Return (address, port) of rank 0: `master_address`, `master_port`."""
        return self.master_address, self.master_port

    fused_worker_dict: dict[str, Any]  # a class of the user's need not be a `Worker`
    """The roles that share this process: role → worker. Empty if the process has one role.

    A class that fuses several roles is a role of its process, but not in this dict. See `sibling`.
    """

    def get_fused_worker_by_name(self, worker_name: str) -> object:
        """Return the worker of a role in this process, None if there is no such role."""
        return self.fused_worker_dict.get(worker_name)

    def query_collect_info(self: _Worker, mesh_name: str) -> bool:
        """Return whether the result of this rank is collected in a mesh."""
        return self._query_collect_info(mesh_name)


class VerlFusedNames:
    """The names of a verl worker that holds the workers of several roles."""

    is_fused_worker = True
    raw_cls_dict: ClassVar[dict[str, type]] = {}
    """role → worker class."""
    fused_roles: dict[str, Any]  # a class of the user's need not be a `Worker`

    def _fuw_execute(self, method_name: str, *args: object, **kwargs: object) -> object:
        """Call a method of one role. `method_name`: "<role>_fwmn_<method>".

        Raises `UnregisteredMethodError` for a role that this process does not have.
        """
        role, _, name = method_name.partition("_fwmn_")
        if role not in self.fused_roles:
            raise UnregisteredMethodError(
                f"expected '<role>_fwmn_<method>' with a role of {sorted(self.fused_roles)}, got "
                f"{method_name!r}",
                method=method_name,
                known=sorted(self.fused_roles),
            )
        return getattr(self.fused_roles[role], name)(*args, **kwargs)
