"""`Worker`: the base class of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quadriga.errors import MeshError, UnregisteredMethodError
from quadriga.single_controller.dispatch.builtin_modes import Dispatch, Execute
from quadriga.single_controller.dispatch.register import register
from quadriga.single_controller.placement import devices
from quadriga.single_controller.placement.rank_layout import RankLayout
from quadriga.single_controller.ranks.environment import RankEnvironment


class Worker:
    """One rank of a worker group.

    Its place (`rank`, `world_size`, …) is read from the environment when the object is made, also
    when a subclass does not call `super().__init__()`. Under a group the variables are set by the
    group; anywhere else (torchrun, a plain script) by whoever starts the process.

    A worker may hold other workers as attributes; those that share its process under roles of
    their own are its siblings, found by `self.<role>` or `self.sibling(role)`.
    """

    _environment: RankEnvironment
    _siblings: dict[str, Worker]
    _meshes: dict[str, tuple[int, bool]]
    _rank_layout: RankLayout | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        self = super().__new__(cls)
        self._environment = RankEnvironment.read()
        self._siblings = {}
        self._meshes = {}
        self._rank_layout = None
        return self

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._visible_devices = cuda_visible_devices or devices.unify_visible_devices()

    @property
    def rank(self) -> int:
        """This rank's number in its group, 0 to world_size - 1."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._environment.world_size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node."""
        return self._environment.local_rank

    @property
    def local_world_size(self) -> int:
        """How many ranks of the group are on this node."""
        return self._environment.local_world_size

    @property
    def master_address(self) -> str:
        """Address of rank 0's node."""
        return self._environment.master_address

    @property
    def master_port(self) -> str:
        """Port that rank 0 chose."""
        return self._environment.master_port

    @property
    def worker_group_prefix(self) -> str:
        """The group's name prefix."""
        return self._environment.group_prefix

    def get_master_addr_port(self) -> tuple[str, str]:
        """(address, port) of rank 0."""
        return self.master_address, self.master_port

    def get_cuda_visible_devices(self) -> str:
        """The devices this process may see, "not set" if no variable says."""
        found = getattr(self, "_visible_devices", None) or devices.visible_devices()
        return found or "not set"

    @property
    def device_index(self) -> int:
        """Which of the visible devices is this rank's own."""
        return devices.device_index(
            self.local_rank, devices.visible_devices(), devices.ray_noset_visible_devices()
        )

    # Sharing a process

    @property
    def fused_worker_dict(self) -> dict[str, Worker]:
        """All roles of this process, by name."""
        return self._siblings

    def sibling(self, role: str) -> Worker:
        """The worker of another role in this process.

        Raises UnregisteredMethodError naming the roles there are.
        """
        try:
            return self._siblings[role]
        except KeyError:
            raise UnregisteredMethodError(
                f"{type(self).__name__} shares its process with {sorted(self._siblings)}, not "
                f"with {role!r}.",
                method=role,
                known=sorted(self._siblings),
            ) from None

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """The sibling of that role, or None."""
        return self._siblings.get(worker_name)

    def __getattr__(self, name: str) -> Any:
        siblings = self.__dict__.get("_siblings")
        if siblings and name in siblings:
            return siblings[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Meshes and layouts

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Say this rank's data-parallel rank in a mesh and whether its result is collected.

        Raises MeshError if the mesh is registered already.
        """
        if mesh_name in self._meshes:
            raise MeshError(
                f"Mesh {mesh_name!r} is registered already by {type(self).__name__} rank "
                f"{self.rank}: dp_rank={self._meshes[mesh_name][0]}.",
                mesh_name=mesh_name,
            )
        if dp_rank < 0:
            raise MeshError(
                f"Mesh {mesh_name!r}: dp_rank must be 0 or more, got {dp_rank}.",
                mesh_name=mesh_name,
            )
        self._meshes[mesh_name] = (dp_rank, bool(is_collect))

    def _register_rank_layout(self, layout: RankLayout) -> None:
        """Say where this rank stands in a tp × cp × dp × pp layout (MEGATRON modes).

        Raises MeshError if another layout was registered before.
        """
        if self._rank_layout not in (None, layout):
            raise MeshError(
                f"{type(self).__name__} rank {self.rank} has registered the layout "
                f"{self._rank_layout} already.",
                mesh_name="layout",
            )
        self._rank_layout = layout

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """This rank's data-parallel rank in a mesh. Raises MeshError if it is not registered."""
        return self._mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's result is collected. Raises MeshError if it is not registered."""
        return self._mesh(mesh_name)[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """(data-parallel rank, is collected) of this rank in a mesh."""
        return self._mesh(mesh_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_rank_layout(self) -> RankLayout:
        """This rank's place. Raises MeshError if no layout is registered."""
        if self._rank_layout is None:
            raise MeshError(
                f"{type(self).__name__} has no rank layout. Call "
                "self._register_rank_layout(RankLayout.of_rank(self.rank, tp, cp, dp, pp)) in the "
                "worker before a MEGATRON dispatch mode is used.",
                mesh_name="layout",
            )
        return self._rank_layout

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's result is collected in a mesh."""
        return self._mesh(mesh_name)[1]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Everything registered: `{"dispatch_dp_rank": {mesh: rank}, "collect_dp_rank": …}`."""
        return {
            "dispatch_dp_rank": {mesh: dp for mesh, (dp, _) in self._meshes.items()},
            "collect_dp_rank": {mesh: collects for mesh, (_, collects) in self._meshes.items()},
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_dispatch_collect(
        self,
        mesh_name: str,
        dispatch_dp_rank: dict[str, int],
        collect_dp_rank: dict[str, bool],
    ) -> None:
        """Register one mesh from dicts in the form of `get_dispatch_collect`."""
        self._register_dispatch_collect_info(
            mesh_name, dispatch_dp_rank[mesh_name], collect_dp_rank[mesh_name]
        )

    def _mesh(self, mesh_name: str) -> tuple[int, bool]:
        try:
            return self._meshes[mesh_name]
        except KeyError:
            raise MeshError(
                f"{type(self).__name__} has not registered the mesh {mesh_name!r}; it knows "
                f"{sorted(self._meshes) or 'none'}. Call self._register_dispatch_collect_info("
                f"{mesh_name!r}, dp_rank, is_collect) in the worker first.",
                mesh_name=mesh_name,
            ) from None

    # Functions of the controller, run here

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run `func(worker, *args, **kwargs)` on every rank with its share of the batches."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `func(*args, **kwargs)` on rank 0."""
        return func(*args, **kwargs)
