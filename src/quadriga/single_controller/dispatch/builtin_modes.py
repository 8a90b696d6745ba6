"""The dispatch and execute modes that come with the package: one literal table each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from quadriga.errors import DispatchError, LengthError
from quadriga.single_controller.call import GroupView
from quadriga.single_controller.dispatch import megatron_modes
from quadriga.single_controller.dispatch.batch_parts import join, split_arguments
from quadriga.single_controller.dispatch.modes import Dispatch, DispatchMode, Execute, ExecuteMode

__all__ = ["ALL_TO_ALL", "EXECUTE_ALL", "Dispatch", "Execute"]

Split = tuple[tuple[Any, ...], dict[str, Any]]


def dispatch_one_to_all(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """The same argument for every rank."""
    n = len(view.ranks)
    return tuple([a] * n for a in args), {name: [a] * n for name, a in kwargs.items()}


def dispatch_lists(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Each argument is a list already, one entry per rank; lengths are checked.

    A call that runs on one rank by its execute mode takes its arguments as they are.
    """
    if "single" in view.memo:
        return dispatch_one_to_all(view, *args, **kwargs)
    named = [(f"argument {i}", a) for i, a in enumerate(args)]
    named += [(f"argument {name!r}", a) for name, a in kwargs.items()]
    for where, value in named:
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
    return args, kwargs


def dispatch_batches(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Every batch split in one part per rank, anything else to all."""
    return split_arguments(view, args, kwargs, len(view.ranks))


def dispatch_function_and_batches(
    view: GroupView, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Split:
    """A function for every rank, then batches to split."""
    if not callable(function):
        raise DispatchError(
            f"{view.method}: the first argument must be a function for every rank, got "
            f"{type(function).__name__}."
        )
    n = len(view.ranks)
    split_args, split_kwargs = split_arguments(view, args, kwargs, n)
    return ([function] * n, *split_args), split_kwargs


def refuse_direct_call(view: GroupView, *args: Any, **kwargs: Any) -> NoReturn:
    """Methods that a rollout engine calls on its workers itself."""
    raise DispatchError(
        f"{view.method} is registered with Dispatch.DIRECT_ROLLOUT_METHOD: an engine calls it on "
        "the workers itself (group.workers[rank]); it cannot be called through a group."
    )


def collect_list(view: GroupView, outputs: Any) -> Any:
    """One result per rank, as they are."""
    return outputs


def collect_first(view: GroupView, outputs: Any) -> Any:
    """The result of the one rank that ran."""
    return outputs[0] if isinstance(outputs, list) and len(view.ranks) == 1 else outputs


def collect_joined(view: GroupView, outputs: Any) -> Any:
    """Batches joined in rank order, padding removed."""
    return join(view, outputs) if isinstance(outputs, list) else outputs


def all_ranks(view: GroupView) -> range:
    """Every rank of the group."""
    return range(view.world_size)


def rank_zero(view: GroupView) -> tuple[int]:
    """Rank 0 alone."""
    return (0,)


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
