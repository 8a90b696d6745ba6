"""The dispatch and collect functions of verl's decorator module, over ours.

They accept any object with `world_size`, so that code that composes them keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.single_controller import Dispatch, Execute
from quadriga.single_controller.call import CallView, GroupView
from quadriga.single_controller.dispatch import builtin_modes as builtin
from quadriga.single_controller.dispatch.batch_parts import join
from quadriga.single_controller.dispatch.mesh_modes import (
    by_part,
    collect_by_mesh,
    dispatch_by_mesh,
)
from quadriga.single_controller.dispatch.modes import ExecuteMode, get_predefined_dispatch_fn
from quadriga.single_controller.dispatch.register import RECORD_ATTRIBUTE

MAGIC_ATTR = RECORD_ATTRIBUTE

Split = tuple[tuple[Any, ...], dict[str, Any]]


def _view(worker_group: Any) -> GroupView:
    if isinstance(worker_group, CallView):
        return worker_group
    return CallView(worker_group, range(worker_group.world_size), "dispatch")


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Split:
    """The same argument for every rank."""
    return builtin.dispatch_one_to_all(_view(worker_group), *args, **kwargs)


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Split:
    """Arguments as they are."""
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: Any) -> Any:
    """Results as they are."""
    return output


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Split:
    """Lists with one entry per rank, checked."""
    return builtin.dispatch_lists(_view(worker_group), *args, **kwargs)


def collect_dp_compute(worker_group: Any, output: Any) -> Any:
    """Results as they are."""
    return output


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Split:
    """Batches split in one part per rank."""
    return builtin.dispatch_batches(_view(worker_group), *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Split:
    """A function for every rank, then batches."""
    return builtin.dispatch_function_and_batches(_view(worker_group), *args, **kwargs)


def collect_dp_compute_data_proto(worker_group: Any, output: Any) -> Any:
    """Batches joined."""
    return builtin.collect_joined(_view(worker_group), output)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Split:
    """Batches split by the data-parallel rank that is given for each rank."""
    return by_part(_view(worker_group), dp_rank_mapping, args, kwargs)


def dispatch_nd_compute(
    dp_rank_mapping: list[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> Split:
    """Lists with one entry per data-parallel rank, spread over the ranks."""

    def spread(entries: Sequence[Any]) -> list[Any]:
        return [entries[dp_rank] for dp_rank in dp_rank_mapping]

    return tuple(map(spread, args)), {name: spread(value) for name, value in kwargs.items()}


def collect_nd_compute(collect_mask: list[bool], worker_group: Any, output: list[Any]) -> list[Any]:
    """Results of the ranks that the mask marks."""
    return [value for value, wanted in zip(output, collect_mask, strict=True) if wanted]


def collect_nd_compute_dataproto(
    collect_mask: list[bool], worker_group: Any, output: list[Any]
) -> Any:
    """Batches of the ranks that the mask marks, joined."""
    return join(_view(worker_group), collect_nd_compute(collect_mask, worker_group, output))


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any
) -> Split:
    """Batches split by a mesh that the workers registered."""
    return dispatch_by_mesh(mesh_name, _view(worker_group), *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: Any, output: Any) -> Any:
    """Batches of a mesh's collecting ranks, joined."""
    return collect_by_mesh(mesh_name, _view(worker_group), output)


def dummy_direct_rollout_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses: raises DispatchError."""
    builtin.refuse_direct_call(_view(worker_group), *args, **kwargs)


def get_predefined_execute_fn(execute_mode: ExecuteMode) -> dict[str, str]:
    """The name of the group's method that runs a mode."""
    return {"execute_fn_name": "execute_rank_zero" if execute_mode.single else "execute_all"}


def init_predefined_dispatch_mode() -> None:
    """The modes are there from the start."""


def init_predefined_execute_mode() -> None:
    """The modes are there from the start."""


class _Registry(dict[Any, Any]):
    """Mode → its two functions; follows modes that are added later."""

    def __missing__(self, mode: Any) -> Any:
        return get_predefined_dispatch_fn(mode)

    def __contains__(self, mode: object) -> bool:
        return mode in Dispatch


DISPATCH_MODE_FN_REGISTRY = _Registry({mode: get_predefined_dispatch_fn(mode) for mode in Dispatch})

__all__ = ["DISPATCH_MODE_FN_REGISTRY", "MAGIC_ATTR", "Dispatch", "Execute"]
