"""A worker group without processes, for checks of dispatch modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from quadriga.errors import MeshError
from quadriga.single_controller import DispatchMode, GroupLayout, RankLayout
from quadriga.single_controller.bound_method import Part, parts_of_ranks
from quadriga.single_controller.call import CallView

Mesh: TypeAlias = tuple[Sequence[int], Sequence[bool]]
"""For each rank its data-parallel rank, and whether its result is collected."""


@dataclass
class SimulatedGroup:
    """A group of `world_size` ranks without processes. A function stands for the worker's method.

    `meshes`: the meshes that the workers would register. `layout`: (tp, cp, dp, pp), the sizes for
    the MEGATRON modes.
    """

    world_size: int
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    layout: tuple[int, int, int, int] | None = None

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank in a mesh."""
        return list(self._mesh(mesh_name)[0])

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank whether its result is collected in a mesh."""
        return list(self._mesh(mesh_name)[1])

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout of all ranks."""
        if self.layout is None:
            raise MeshError(
                "This simulated group has no layout. Pass SimulatedGroup(layout=(tp, cp, dp, pp)).",
                mesh_name="layout",
            )
        tp, cp, dp, pp = self.layout
        return GroupLayout.of(
            [RankLayout.of_rank(rank, tp, cp, dp, pp) for rank in range(self.world_size)]
        )

    def _mesh(self, name: str) -> Mesh:
        if name not in self.meshes:
            raise MeshError(
                f"This simulated group has no mesh {name!r}, only {sorted(self.meshes)}. Pass "
                "SimulatedGroup(meshes={name: (dp_ranks, collects)}).",
                mesh_name=name,
            )
        return self.meshes[name]

    def split(
        self, mode: DispatchMode, *args: object, **kwargs: object
    ) -> tuple[CallView, Sequence[Part]]:
        """Dispatch the arguments. Return the view and (args, kwargs) for each executing rank."""
        view = CallView(self, range(self.world_size), "simulated.call")
        if mode.ranks is not None:
            view.ranks = mode.ranks(view)
        return view, parts_of_ranks(view, mode.dispatch_fn(view, *args, **kwargs))

    def call(
        self, mode: DispatchMode, worker: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Dispatch, call `worker(rank, *args, **kwargs)` for each executing rank, and collect."""
        view, parts = self.split(mode, *args, **kwargs)
        outputs = [
            worker(rank, *part_args, **part_kwargs)
            for rank, (part_args, part_kwargs) in zip(view.ranks, parts, strict=True)
        ]
        return mode.collect_fn(view, outputs)
