"""The dispatch and collect functions of verl's decorator module, computed by the dispatch modes.

`worker_group` is a worker group or a view of one. The functions without a mesh need only its
`world_size`, so that code which composes them can pass an object of its own. A function that joins
batches accepts Ray's references to them too, and then returns a `DataProtoFuture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import Any, TypedDict, TypeVar, cast

from quadriga import single_controller
from quadriga.compat.verl.controller.joining import collect_later
from quadriga.compat.verl.controller.padding import with_count, with_uneven_parts
from quadriga.errors import DispatchError
from quadriga.single_controller import Dispatch, Execute, batch_modes, dispatch
from quadriga.single_controller.call import (
    CallView,
    CollectFn,
    DispatchFn,
    GroupInfo,
    GroupView,
    ModeFunctions,
    Split,
)
from quadriga.single_controller.dispatch import (
    VERL_ATTRIBUTE,
    DispatchMode,
    ExecuteMode,
    inline_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller.dispatch import (
    get_predefined_dispatch_fn as functions_of_mode,
)

MAGIC_ATTR = VERL_ATTRIBUTE


def _view(worker_group: GroupInfo) -> GroupView:
    """Return the view of a call. If one rank runs it, it is split for all ranks, as in verl."""
    every = range(worker_group.world_size)
    if not isinstance(worker_group, CallView):
        return CallView(worker_group, every, "dispatch")
    if not worker_group.single:
        return worker_group
    view = CallView(worker_group.group, every, worker_group.method)
    view.memo = worker_group.memo  # the collect function of the call reads it
    return view


def dispatch_one_to_all(worker_group: GroupInfo, *args: object, **kwargs: object) -> Split:
    """Repeat each argument for every rank of the group."""
    n = worker_group.world_size
    return tuple([value] * n for value in args), {name: [v] * n for name, v in kwargs.items()}


def dispatch_all_to_all(
    worker_group: GroupInfo, *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments unchanged. `columns` says which rank receives what of them."""
    return args, kwargs


def collect_all_to_all(worker_group: GroupInfo, output: list[object]) -> list[object]:
    """Return the results unchanged, one per rank."""
    return output


def dispatch_dp_compute(worker_group: GroupInfo, *args: object, **kwargs: object) -> Split:
    """Check that each argument is a list with one entry per rank. Raises `LengthError` if not."""
    return dispatch.dispatch_lists(_view(worker_group), *args, **kwargs)


def collect_dp_compute(worker_group: GroupInfo, output: list[object]) -> list[object]:
    """Return the results unchanged, one per rank."""
    return output


def dispatch_dp_compute_data_proto(
    worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch into one part per rank. `padding` says how rows are added."""
    view = _view(worker_group)
    return _listed(worker_group, view, batch_modes.dispatch_batches(view, *args, **kwargs))


def dispatch_dp_compute_data_proto_with_func(
    worker_group: GroupInfo,
    function: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> Split:
    """Send `function` to every rank and split every batch into one part per rank."""
    view = _view(worker_group)
    split = batch_modes.dispatch_function_and_batches(view, function, *args, **kwargs)
    return _listed(worker_group, view, split)


def _listed(worker_group: GroupInfo, view: GroupView, split: Split) -> Split:
    """Return split arguments with a list of the positional ones, as these functions of verl do."""
    args, kwargs = split if isinstance(worker_group, CallView) else with_count(view, split)
    return cast(Split, (list(args), kwargs))


def _by_part(worker_group: GroupInfo, view: GroupView, split: Split) -> Split:
    return split if isinstance(worker_group, CallView) else with_uneven_parts(view, split)


def collect_dp_compute_data_proto(worker_group: GroupInfo, output: list[object]) -> object:
    """Concatenate the batches of the ranks and remove the padding."""
    return collect_later(batch_modes.collect_joined, _view(worker_group), output)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int],
    dp_size: int,
    worker_group: GroupInfo,
    *args: object,
    **kwargs: object,
) -> Split:
    """Split every batch by data-parallel rank. Rank r receives part `dp_rank_mapping[r]`."""
    view = _view(worker_group)
    split = batch_modes.split_by_part(view, dp_rank_mapping, args, kwargs)
    return _by_part(worker_group, view, split)


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
    chosen = collect_nd_compute(collect_mask, worker_group, output)
    return collect_later(batch_modes.collect_joined, _view(worker_group), chosen)


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch by data-parallel rank of a mesh that the workers registered."""
    view = _view(worker_group)
    split = batch_modes.dispatch_by_mesh(mesh_name, view, *args, **kwargs)
    return _by_part(worker_group, view, split)


def collect_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, output: list[object]
) -> object:
    """Concatenate the batches of the collecting ranks of a mesh."""
    collect_fn = partial(batch_modes.collect_by_mesh, mesh_name)
    return collect_later(collect_fn, _view(worker_group), output)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return the dispatch mode of a mesh. Both functions take a group, or a view of one."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def dummy_direct_rollout_call(worker_group: GroupInfo, *args: object, **kwargs: object) -> None:
    """Raise DispatchError: methods of DIRECT_ROLLOUT_METHOD are not called through a group."""
    dispatch.refuse_direct_call(_view(worker_group), *args, **kwargs)


class ExecuteName(TypedDict):
    """The name of the group's method that runs calls of an execute mode."""

    execute_fn_name: str


def get_predefined_execute_fn(execute_mode: ExecuteMode) -> ExecuteName:
    """Return the name of the group's method that runs calls of this mode.

    It is `execute_` and the name of the mode: `execute_first_half` for `Execute.FIRST_HALF`.
    """
    return {"execute_fn_name": f"execute_{execute_mode.name.lower()}"}


def init_predefined_dispatch_mode() -> None:
    """Do nothing: the built-in dispatch modes exist from the start."""


def init_predefined_execute_mode() -> None:
    """Do nothing: the built-in execute modes exist from the start."""


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def register(
    dispatch_mode: DispatchMode | Mapping[str, Any] = Dispatch["ALL_TO_ALL"],
    execute_mode: ExecuteMode = Execute["ALL"],
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[FunctionT], FunctionT]:
    """Mark a worker method as `quadriga.register` does.

    A dict of functions may have other keys besides `dispatch_fn` and `collect_fn`. They are not
    read, and are found in the record under `MAGIC_ATTR`.
    """
    given = dispatch_mode
    mode = inline_functions(given) if isinstance(given, Mapping) else given
    mark = single_controller.register(mode, execute_mode, blocking, materialize_futures)

    def mark_as_given(function: FunctionT) -> FunctionT:
        marked = mark(function)
        getattr(marked, MAGIC_ATTR)["dispatch_mode"] = given
        return marked

    return mark_as_given


def _check_dispatch_mode(dispatch_mode: object) -> None:
    """Raise `DispatchError` unless the value is a dispatch mode or a dict of its functions."""
    if isinstance(dispatch_mode, dict):
        inline_functions(dispatch_mode)
    elif not isinstance(dispatch_mode, DispatchMode):
        raise DispatchError(
            "dispatch_mode must be a member of Dispatch or a dict with 'dispatch_fn' and "
            f"'collect_fn', got {dispatch_mode!r}."
        )


def _check_execute_mode(execute_mode: object) -> None:
    """Raise `DispatchError` unless the value is an execute mode."""
    if not isinstance(execute_mode, ExecuteMode):
        raise DispatchError(f"execute_mode must be a member of Execute, got {execute_mode!r}.")


# The functions of a mode, for programs that call them with a group


def _dispatch_for_group(
    function: DispatchFn, worker_group: GroupInfo, *a: object, **k: object
) -> Split:
    return function(_view(worker_group), *a, **k)


def _collect_for_group(function: CollectFn, worker_group: GroupInfo, output: object) -> object:
    return collect_later(function, _view(worker_group), output)


_BUILT_IN = {mode.name: mode for mode in Dispatch}
_FUNCTIONS: dict[str, ModeFunctions] = {
    "ONE_TO_ALL": {"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all},
    "ALL_TO_ALL": {
        "dispatch_fn": cast(DispatchFn, dispatch_all_to_all),
        "collect_fn": collect_all_to_all,
    },
    "DP_COMPUTE": {"dispatch_fn": dispatch_dp_compute, "collect_fn": collect_dp_compute},
    "DP_COMPUTE_PROTO": {
        "dispatch_fn": dispatch_dp_compute_data_proto,
        "collect_fn": collect_dp_compute_data_proto,
    },
    "DP_COMPUTE_PROTO_WITH_FUNC": {
        "dispatch_fn": dispatch_dp_compute_data_proto_with_func,
        "collect_fn": collect_dp_compute_data_proto,
    },
    "DP_COMPUTE_METRIC": {
        "dispatch_fn": dispatch_dp_compute_data_proto,
        "collect_fn": collect_dp_compute,
    },
}
"""The functions of this module that verl's modes have."""


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> ModeFunctions:
    """Return the two functions of a mode. Both take a group, or a view of one."""
    functions = functions_of_mode(dispatch_mode)
    if Dispatch[dispatch_mode.name] is not _BUILT_IN.get(dispatch_mode.name):
        return functions
    return _FUNCTIONS.get(dispatch_mode.name) or {
        "dispatch_fn": _for_group(_dispatch_for_group, functions["dispatch_fn"]),
        "collect_fn": _for_group(_collect_for_group, functions["collect_fn"]),
    }


@cache
def _for_group(adapter: Callable[..., Any], function: Callable[..., object]) -> Callable[..., Any]:
    """Return one object per function, so that the functions of a mode compare equal."""
    return partial(adapter, function)


class _Registry(MutableMapping[DispatchMode, ModeFunctions]):
    """Dispatch mode → its two functions, for every mode of `Dispatch`.

    Assigning to it replaces the functions of a mode, also for methods that are registered already.
    """

    def __getitem__(self, mode: DispatchMode) -> ModeFunctions:
        return get_predefined_dispatch_fn(mode)

    def __setitem__(self, mode: DispatchMode, functions: Mapping[str, Any]) -> None:
        update_dispatch_mode(mode, **inline_functions(functions))

    def __delitem__(self, mode: DispatchMode) -> None:
        Dispatch.remove(mode.name)

    def __iter__(self) -> Iterator[DispatchMode]:
        return iter(Dispatch)

    def __len__(self) -> int:
        return len(Dispatch)

    def __contains__(self, mode: object) -> bool:
        return mode in Dispatch


def inline_functions(functions: Mapping[str, Any]) -> ModeFunctions:
    """Return the two functions of a mode. Raises `DispatchError` if one of them is missing."""
    two = {key: functions[key] for key in ("dispatch_fn", "collect_fn") if key in functions}
    mode = inline_dispatch_mode(cast(ModeFunctions, two))
    return {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}


DISPATCH_MODE_FN_REGISTRY = _Registry()


# The functions of the MEGATRON modes


def _megatron(name: str) -> ModeFunctions:
    return get_predefined_dispatch_fn(Dispatch[name])


dispatch_megatron_compute = _megatron("MEGATRON_COMPUTE")["dispatch_fn"]
collect_megatron_compute = _megatron("MEGATRON_COMPUTE")["collect_fn"]
dispatch_megatron_compute_data_proto = _megatron("MEGATRON_COMPUTE_PROTO")["dispatch_fn"]
collect_megatron_compute_data_proto = _megatron("MEGATRON_COMPUTE_PROTO")["collect_fn"]
dispatch_megatron_pp_as_dp = _megatron("MEGATRON_PP_AS_DP")["dispatch_fn"]
collect_megatron_pp_as_dp = _megatron("MEGATRON_PP_AS_DP")["collect_fn"]
dispatch_megatron_pp_as_dp_data_proto = _megatron("MEGATRON_PP_AS_DP_PROTO")["dispatch_fn"]
collect_megatron_pp_as_dp_data_proto = _megatron("MEGATRON_PP_AS_DP_PROTO")["collect_fn"]
dispatch_megatron_pp_only = _megatron("MEGATRON_PP_ONLY")["dispatch_fn"]
collect_megatron_pp_only = _megatron("MEGATRON_PP_ONLY")["collect_fn"]

__all__ = ["DISPATCH_MODE_FN_REGISTRY", "MAGIC_ATTR", "Dispatch", "Execute"]
