"""The dispatch and collect functions of verl's decorator module, computed by the dispatch modes.

`worker_group` is a worker group or a view of one. The functions without a mesh need only its
`world_size`, so that code which composes them can pass an object of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quadriga.single_controller import Dispatch, Execute
from quadriga.single_controller.call import CallView, GroupInfo, GroupView, Split
from quadriga.single_controller.dispatch import batch_modes, builtin_modes
from quadriga.single_controller.dispatch.modes import (
    DispatchMode,
    ExecuteMode,
    ModeFunctions,
    get_predefined_dispatch_fn,
)
from quadriga.single_controller.dispatch.register import RECORD_ATTRIBUTE

MAGIC_ATTR = RECORD_ATTRIBUTE


def _view(worker_group: GroupInfo) -> GroupView:
    if isinstance(worker_group, CallView):
        return worker_group
    return CallView(worker_group, range(worker_group.world_size), "dispatch")


def dispatch_one_to_all(worker_group: GroupInfo, *args: object, **kwargs: object) -> Split:
    """Send the same argument to every rank."""
    n = len(_view(worker_group).ranks)
    return tuple([value] * n for value in args), {name: [v] * n for name, v in kwargs.items()}


def dispatch_all_to_all(
    worker_group: GroupInfo, *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments unchanged; each is a list with one entry per rank."""
    return args, kwargs


def collect_all_to_all(worker_group: GroupInfo, output: list[object]) -> list[object]:
    """Return the results unchanged, one per rank."""
    return output


def dispatch_dp_compute(worker_group: GroupInfo, *args: object, **kwargs: object) -> Split:
    """Check that each argument is a list with one entry per rank. Raises `LengthError` if not."""
    return builtin_modes.dispatch_lists(_view(worker_group), *args, **kwargs)


def collect_dp_compute(worker_group: GroupInfo, output: list[object]) -> list[object]:
    """Return the results unchanged, one per rank."""
    return output


def dispatch_dp_compute_data_proto(
    worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch into one part per rank."""
    return batch_modes.dispatch_batches(_view(worker_group), *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: GroupInfo,
    function: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> Split:
    """Send `function` to every rank and split every batch into one part per rank."""
    return batch_modes.dispatch_function_and_batches(_view(worker_group), function, *args, **kwargs)


def collect_dp_compute_data_proto(worker_group: GroupInfo, output: list[object]) -> object:
    """Concatenate the batches of the ranks and remove the padding."""
    return batch_modes.collect_joined(_view(worker_group), output)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int],
    dp_size: int,
    worker_group: GroupInfo,
    *args: object,
    **kwargs: object,
) -> Split:
    """Split every batch by data-parallel rank. Rank r receives part `dp_rank_mapping[r]`."""
    return batch_modes.split_by_part(_view(worker_group), dp_rank_mapping, args, kwargs)


def dispatch_nd_compute(
    dp_rank_mapping: list[int],
    dp_size: int,
    worker_group: GroupInfo,
    *args: Sequence[object],
    **kwargs: Sequence[object],
) -> Split:
    """Give rank r entry `dp_rank_mapping[r]` of each argument, a list per data-parallel rank."""

    def spread(entries: Sequence[object]) -> list[object]:
        return [entries[dp_rank] for dp_rank in dp_rank_mapping]

    return tuple(map(spread, args)), {name: spread(value) for name, value in kwargs.items()}


def collect_nd_compute(
    collect_mask: list[bool], worker_group: GroupInfo, output: list[object]
) -> list[object]:
    """Return the results of the ranks whose entry in `collect_mask` is true."""
    return [value for value, collects in zip(output, collect_mask, strict=True) if collects]


def collect_nd_compute_dataproto(
    collect_mask: list[bool], worker_group: GroupInfo, output: list[object]
) -> object:
    """Concatenate the batches of the ranks whose entry in `collect_mask` is true."""
    return batch_modes.join(
        _view(worker_group), collect_nd_compute(collect_mask, worker_group, output)
    )


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch by data-parallel rank of a mesh that the workers registered."""
    return batch_modes.dispatch_by_mesh(mesh_name, _view(worker_group), *args, **kwargs)


def collect_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, output: list[object]
) -> object:
    """Concatenate the batches of the collecting ranks of a mesh."""
    return batch_modes.collect_by_mesh(mesh_name, _view(worker_group), output)


def dummy_direct_rollout_call(worker_group: GroupInfo, *args: object, **kwargs: object) -> None:
    """Raise DispatchError: methods of DIRECT_ROLLOUT_METHOD are not called through a group."""
    builtin_modes.refuse_direct_call(_view(worker_group), *args, **kwargs)


def get_predefined_execute_fn(execute_mode: ExecuteMode) -> dict[str, str]:
    """Return the name of the group's method that runs calls of this mode."""
    return {"execute_fn_name": "execute_rank_zero" if execute_mode.single else "execute_all"}


def init_predefined_dispatch_mode() -> None:
    """Do nothing: the built-in dispatch modes exist from the start."""


def init_predefined_execute_mode() -> None:
    """Do nothing: the built-in execute modes exist from the start."""


class _Registry(dict[DispatchMode, ModeFunctions]):
    """Dispatch mode → its two functions, those of modes that are added later included."""

    def __missing__(self, mode: DispatchMode) -> ModeFunctions:
        return get_predefined_dispatch_fn(mode)

    def __contains__(self, mode: object) -> bool:
        return mode in Dispatch


DISPATCH_MODE_FN_REGISTRY = _Registry({mode: get_predefined_dispatch_fn(mode) for mode in Dispatch})

__all__ = ["DISPATCH_MODE_FN_REGISTRY", "MAGIC_ATTR", "Dispatch", "Execute"]
