"""Groups without processes: what dispatch and collect functions need to know of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quadriga.errors import MeshError
from quadriga.single_controller import DispatchMode, GroupLayout, RankLayout
from quadriga.single_controller.call import CallView
from quadriga.single_controller.submit import parts_of_ranks

Mesh = tuple[Sequence[int], Sequence[bool]]


@dataclass
class SimulatedGroup:
    """`world_size` ranks that exist only in name.

    `meshes`: for each mesh the data-parallel rank of every rank, and who collects. `layout`:
    (tp, cp, dp, pp) sizes for the MEGATRON modes.
    """

    world_size: int
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    layout: tuple[int, int, int, int] | None = None

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """For each rank its data-parallel rank."""
        return list(self._mesh(mesh_name)[0])

    def collect_info(self, mesh_name: str) -> list[bool]:
        """For each rank whether its result is collected."""
        return list(self._mesh(mesh_name)[1])

    @property
    def rank_layout(self) -> GroupLayout:
        """The layout of all ranks."""
        if self.layout is None:
            raise MeshError("This simulated group has no layout; give it one.", mesh_name="layout")
        tp, cp, dp, pp = self.layout
        return GroupLayout.of(
            [RankLayout.of_rank(rank, tp, cp, dp, pp) for rank in range(self.world_size)]
        )

    def _mesh(self, name: str) -> Mesh:
        if name not in self.meshes:
            raise MeshError(f"This simulated group has no mesh {name!r}.", mesh_name=name)
        return self.meshes[name]

    def split(self, mode: DispatchMode, *args: Any, **kwargs: Any) -> tuple[CallView, list[Any]]:
        """What each executing rank would receive: (args, kwargs) per rank."""
        view = CallView(self, range(self.world_size), "simulated.call")
        if mode.ranks is not None:
            view.ranks = mode.ranks(view)
        return view, parts_of_ranks(view, mode.dispatch_fn(view, *args, **kwargs))

    def call(
        self, mode: DispatchMode, worker: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Split, let `worker(rank, *args, **kwargs)` answer for each rank, and join."""
        view, parts = self.split(mode, *args, **kwargs)
        outputs = [
            worker(rank, *part_args, **part_kwargs)
            for rank, (part_args, part_kwargs) in zip(view.ranks, parts, strict=True)
        ]
        return mode.collect_fn(view, outputs)
