"""The dispatch and execute modes that come with the package, in one table each."""

from __future__ import annotations

from typing import NoReturn

from quadriga.errors import DispatchError, LengthError
from quadriga.single_controller.call import GroupView, Split
from quadriga.single_controller.dispatch import megatron_modes
from quadriga.single_controller.dispatch.batch_modes import (
    collect_joined,
    dispatch_batches,
    dispatch_function_and_batches,
)
from quadriga.single_controller.dispatch.modes import (
    Dispatch,
    DispatchMode,
    Execute,
    ExecuteMode,
    all_ranks,
    dispatch_one_to_all,
    rank_zero,
)

__all__ = ["ALL_TO_ALL", "EXECUTE_ALL", "Dispatch", "Execute"]


def dispatch_lists(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Take lists with one entry per rank.

    A call that its execute mode runs on one rank takes the arguments as they are. Raises
    `DispatchError` for an argument that is not a list, `LengthError` for a list of another length.
    """
    if view.single:
        return dispatch_one_to_all(view, *args, **kwargs)
    return (
        tuple(_checked_list(view, f"argument {i}", a) for i, a in enumerate(args)),
        {name: _checked_list(view, f"argument {name!r}", a) for name, a in kwargs.items()},
    )


def _checked_list(view: GroupView, where: str, value: object) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DispatchError(
            f"{view.method}: {where} must be a list with one entry per rank "
            f"({view.world_size}), got {type(value).__name__}."
        )
    if len(value) not in (view.world_size, len(view.ranks)):
        raise LengthError(
            f"{view.method}: {where} has {len(value)} entries for {view.world_size} ranks. "
            "Pass one entry per rank."
        )
    return value


def refuse_direct_call(view: GroupView, /, *args: object, **kwargs: object) -> NoReturn:
    """Raise DispatchError: the method is for a rollout engine that calls its workers itself."""
    raise DispatchError(
        f"{view.method} is registered with Dispatch.DIRECT_ROLLOUT_METHOD: an engine calls it on "
        "the workers itself (group.workers[rank]); it cannot be called through a group."
    )


def collect_list(view: GroupView, outputs: object) -> object:
    """Return the results as a list with one entry per rank."""
    return outputs


def collect_first(view: GroupView, outputs: object) -> object:
    """Return the result of the one rank that executed the call."""
    return outputs[0] if isinstance(outputs, list) and len(view.ranks) == 1 else outputs


# name, split, join
_DISPATCH = (
    DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_first, ranks=rank_zero),
    DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_list),
    DispatchMode("ALL_TO_ALL", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE_PROTO", dispatch_batches, collect_joined),
    DispatchMode("DP_COMPUTE_PROTO_WITH_FUNC", dispatch_function_and_batches, collect_joined),
    DispatchMode("DP_COMPUTE_METRIC", dispatch_batches, collect_list),
    DispatchMode("DIRECT_ROLLOUT_METHOD", refuse_direct_call, refuse_direct_call),
    *megatron_modes.MODES,
)

_EXECUTE = (
    ExecuteMode("ALL", all_ranks),
    ExecuteMode("RANK_ZERO", rank_zero, single=True),
)

for _mode in _DISPATCH:
    Dispatch.add(_mode)
for _execute in _EXECUTE:
    Execute.add(_execute)
Dispatch.seal()
Execute.seal()

ALL_TO_ALL = Dispatch["ALL_TO_ALL"]
EXECUTE_ALL = Execute["ALL"]
