"""verl's `Worker`: Quadriga's worker with verl's method names. And the fused classes of verl."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.single_controller import ClassWithInitArgs, FusedWorker
from quadriga.single_controller import Worker as QuadrigaWorker
from quadriga.single_controller import create_colocated_worker_raw_cls as create_fused_class


class Worker(QuadrigaWorker):
    """Quadriga's worker under verl's method names.

    Quadriga's own names are `master_address`, `master_port`, `sibling(role)`, and
    `_query_collect_info`.
    """

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return (address, port) of rank 0."""
        return self.master_address, self.master_port

    @property
    def fused_worker_dict(self) -> Mapping[str, object]:
        """All roles of this process: role → worker."""
        return self._siblings

    def get_fused_worker_by_name(self, worker_name: str) -> object:
        """Return the worker of another role in this process, None if there is no such role."""
        return self.fused_worker_dict.get(worker_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether the result of this rank is collected in a mesh."""
        return self._query_collect_info(mesh_name)


def create_colocated_worker_raw_cls(class_dict: dict[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """Return a class with one worker per role as attributes, and with verl's method names."""
    # `Worker` comes first, so that a subclass of the result finds verl's names; `fused` provides
    # `__init__` and the roles.
    fused = create_fused_class(class_dict)
    return type(fused.__name__, (Worker, fused), {"__module__": __name__})


def create_colocated_worker_cls_fused(
    class_dict: dict[str, ClassWithInitArgs],
) -> ClassWithInitArgs:
    """Return the class of `create_colocated_worker_raw_cls` with its arguments, for Ray."""
    from quadriga.backends.ray import RayClassWithInitArgs

    return RayClassWithInitArgs(create_colocated_worker_raw_cls(copy.copy(class_dict)))


@dataclass
class DistRankInfo:
    """Coordinates of a rank in a tp × dp × pp × cp layout."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


@dataclass
class DistGlobalInfo:
    """Sizes of a tp × dp × pp × cp layout."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int
