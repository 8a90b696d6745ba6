"""verl's decorator module: `register`, dispatch and collect functions, computed by the modes.

`worker_group` is a worker group or a view of one. The functions without a mesh need only its
`world_size`, so that code which composes them can pass an object of its own. A function that joins
batches accepts Ray's references to them too, and then returns a `DataProtoFuture`.

A dispatch function of verl returns (args, kwargs), and an execute function decides what they mean:

    all ranks    each argument is a list with world_size entries    rank i: entry i of each
                 otherwise                                          every rank: all of them, whole
    rank zero                                                       rank zero: all of them, whole

Example with 2 ranks: `[3, 4], k=[5, 6]` is split, `[3, 4], k=5` is not, and neither is `(3, 4)`.

Padding, where a program calls the functions with a group, as verl's do it:

    args, kwargs = dispatch_dp_compute_data_proto(group, batch)    kwargs[PADDING]: rows added
    count = kwargs.pop(PADDING, 0)
    output = collect_dp_compute_data_proto(group, run(*args, **kwargs))
    output = without_padding(output, count)

The functions for a mesh add no rows then: their parts are uneven. In a call of a group, the view of
the call keeps the padding, and the collect function removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, cast

import torch

from quadriga import protocol, single_controller
from quadriga.compat.verl.controller.references import all_references, is_reference, pending_values
from quadriga.errors import DispatchError, FieldError, LengthError
from quadriga.protocol import DataProto
from quadriga.protocol.tensordicts import TensorDict
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller import Dispatch, Execute, dispatch
from quadriga.single_controller.dispatch import (
    Arguments,
    CollectFn,
    Collector,
    DispatchFn,
    GroupInfo,
    GroupView,
    KeywordArguments,
    ModeFunctions,
    PartScheme,
    Split,
)
from quadriga.single_controller.modes import (
    DispatchMode,
    ExecuteMode,
    get_predefined_dispatch_fn as functions_of_mode,
    inline_dispatch_mode,
    update_dispatch_mode,
)
from quadriga.single_controller.padding import Padding
from quadriga.single_controller.worker import record_of
from quadriga.single_controller.worker_group import Part, parts_of_ranks

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref


class DataProtoFuture(protocol.DataProtoFuture):
    """A batch that ranks may still be computing, with the arguments of verl.

    Args:
        collect_fn: joins the objects of the references to one batch. `DataProto.concat`, the
            default, also joins TensorDicts. `DataProtoFuture(refs)` has the references alone.
        futures: Ray's references to batches, in order.
        dispatch_fn: makes the value of `get()` from the joined batch; None: the batch itself.
        others: references of other ranks of the call. They are not joined, but waited for: a rank
            that fails ends the wait for the ranks that it has a collective with.
    """

    def __init__(
        self,
        collect_fn: Callable[[list[Any]], Any] | Sequence[Any] = protocol.DataProto.concat,
        futures: Sequence[Any] | None = None,  # references of Ray
        dispatch_fn: Callable[[Any], Any] | None = None,
        others: Sequence[Any] = (),
    ) -> None:
        if not callable(collect_fn):  # `DataProtoFuture(refs)`
            futures, collect_fn = collect_fn, protocol.DataProto.concat
        if not futures or not all(map(is_reference, futures)):
            raise FieldError(
                f"DataProtoFuture: expected a list of Ray's references to batches, got {futures!r}"
            )
        super().__init__(list(pending_values([*futures, *others])), collect_fn)
        self.futures = list(futures)
        self.dispatch_fn = dispatch_fn

    @staticmethod
    def concat(data: Sequence[Any]) -> protocol.DataProtoFuture:
        """Return one future of several references, or of several futures, without waiting."""
        if not data:
            raise LengthError("concat: expected at least one reference, got an empty list")
        if any(isinstance(value, PendingValue) for value in data):
            return protocol.DataProtoFuture.concat(data)
        return DataProtoFuture(protocol.DataProto.concat, data)

    def chunk(self, chunks: int, uneven: bool = False) -> list[protocol.DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting."""
        return [self._with_parts(part.parts) for part in super().chunk(chunks, uneven)]

    def _with_parts(self, parts: tuple[Any, ...]) -> Self:
        twin = type(self)(self.collect_fn or protocol.DataProto.concat, self.futures)
        twin.pending, twin.parts, twin.dispatch_fn = self.pending, parts, self.dispatch_fn
        return twin

    def _joined(self, packed: Sequence[object]) -> Any:
        given, self_parts = self.collect_fn, self.parts
        joined = protocol.DataProtoFuture(
            [], None if given is protocol.DataProto.concat else given
        )._joined(packed[: len(self.futures)])
        if self.dispatch_fn is not None:
            joined = self.dispatch_fn(joined)
        for part in self_parts:
            joined = part.of(joined)
        return joined


PADDING = "_padding_size_key_x123d"
"""verl's key."""


def with_count(view: GroupView, split: Split) -> Split:
    """Return split arguments without the field that marks padding, and with the rows added."""
    padding = view.memo.get("padding")
    if not isinstance(padding, Padding):
        return split
    args, kwargs = split
    for parts in (*args, *kwargs.values()):
        for part in parts:
            if isinstance(part, DataProto):
                part.non_tensor_batch.pop(padding.field, None)
    added: object = padding.parts * padding.part_rows - padding.rows
    return cast(Split, (args, {**kwargs, PADDING: added}))


def with_uneven_parts(view: GroupView, split: Split) -> Split:
    """Return split arguments without the rows that are padding."""
    padding = view.memo.get("padding")
    if not isinstance(padding, Padding):
        return split
    real: dict[int, object] = {}  # ranks that receive the same part still do

    def of(part: object) -> object:
        if not isinstance(part, DataProto) or padding.field not in part.non_tensor_batch:
            return part
        if id(part) not in real:
            marked = torch.from_numpy(part.non_tensor_batch[padding.field].astype(bool))
            kept = part[~marked]
            kept.non_tensor_batch.pop(padding.field)
            real[id(part)] = kept
        return real[id(part)]

    args, kwargs = split
    return (
        tuple([of(part) for part in parts] for parts in args),
        {name: [of(part) for part in parts] for name, parts in kwargs.items()},
    )


def without_padding(output: object, count: int) -> object:
    """Return a batch or a list of results without its last `count` entries."""
    if not count or not isinstance(output, DataProto | list):
        return output
    return output[:-count]


def collect_later(collect_fn: CollectFn, view: GroupView, output: object) -> object:
    """Join results, or return a future of the batches that references of Ray name.

    The future has the references of the ranks that are collected. A collect function of the user's,
    and one that returns a list, receives all references.
    """
    scheme: object = getattr(collect_fn, "__self__", None)
    joins_parts = isinstance(scheme, PartScheme) and collect_fn == scheme.collect_batches
    if is_reference(output) and (joins_parts or collect_fn is dispatch.collect_joined):
        return _future(view, collect_fn, [output])  # of the one rank that runs the call
    if not all_references(output):
        return collect_fn(view, output)
    if collect_fn is dispatch.collect_joined:
        return _future(view, collect_fn, output)
    if joins_parts:
        return _future_of_parts(view, cast(PartScheme, scheme), output)
    return collect_fn(view, output)


def _future_of_parts(view: GroupView, scheme: PartScheme, refs: Sequence[Ref]) -> DataProtoFuture:
    """Return the future of one result per part, which also ends if another rank fails."""
    chosen = cast("dict[int, Ref]", scheme.of_parts(view, refs))
    known = {id(ref) for ref in chosen.values()}
    others = [ref for ref in refs if id(ref) not in known]
    return _future(view, partial(_join_parts, list(chosen)), list(chosen.values()), others)


def _join_parts(parts: list[int], view: GroupView, outputs: Sequence[object]) -> object:
    return dispatch.join(view, outputs, parts)


def _future(
    view: GroupView, collect_fn: CollectFn, refs: Sequence[Ref], others: Sequence[Any] = ()
) -> DataProtoFuture:
    assert isinstance(view, GroupView)
    return DataProtoFuture(Collector(collect_fn, view), list(refs), others=others)


# What verl's dispatch functions are made of, for functions of a program that are made of it too

BatchParts: TypeAlias = tuple[list[list[Any]], dict[str, list[Any]]]
"""For each argument one part per rank."""


def _materialize_futures(
    *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the arguments with the batch of each future in its place."""

    def value(given: object) -> object:
        return given.get() if isinstance(given, protocol.DataProtoFuture) else given

    return tuple(map(value, args)), {name: value(given) for name, given in kwargs.items()}


def _split_args_kwargs_data_proto(chunks: int, *args: object, **kwargs: object) -> BatchParts:
    """Split each argument into equal parts. Raises `LengthError` if its rows do not divide, and
    `FieldError` if it is neither a batch nor the future of one."""

    def parts(given: object) -> list[Any]:
        if isinstance(given, DataProto | protocol.DataProtoFuture):
            return list(given.chunk(chunks))
        if isinstance(given, TensorDict):
            return [part.to_tensordict() for part in DataProto.from_tensordict(given).chunk(chunks)]
        raise FieldError(f"expected a batch to split into {chunks} parts, got {given!r:.200}")

    return list(map(parts, args)), {name: parts(given) for name, given in kwargs.items()}


def _split_args_kwargs_data_proto_with_auto_padding(
    chunks: int, *args: object, **kwargs: object
) -> BatchParts:
    """Split as above, after a batch that allows it was padded to equal parts. Then the rows that
    were added are under `PADDING`. Raises `LengthError` if such batches differ in length."""
    batches = [given for given in (*args, *kwargs.values()) if isinstance(given, DataProto)]
    padded = [given for given in batches if given.is_padding_enabled()]
    lengths = sorted(set(map(len, padded)))
    if len(lengths) > 1:
        raise LengthError(f"batches to pad must have one length, got {lengths}")
    for given in padded:
        given.padding(-lengths[0] % chunks)
    split_args, split_kwargs = _split_args_kwargs_data_proto(chunks, *args, **kwargs)
    return split_args, split_kwargs | ({PADDING: cast(Any, -lengths[0] % chunks)} if padded else {})


def _concat_data_proto_or_future(output: Sequence[Any]) -> Any:
    """Join the batches, or the futures or references of batches, of all ranks.

    Raises `FieldError` unless all of them are of one kind.
    """
    if len({type(value) for value in output}) != 1:
        raise FieldError(f"expected batches or futures of one type to join, got {output!r:.200}")
    if isinstance(output[0], TensorDict):
        return DataProto.concat(list(map(DataProto.from_tensordict, output))).to_tensordict()
    return (DataProto if isinstance(output[0], DataProto) else DataProtoFuture).concat(output)


MAGIC_ATTR = "attrs_3141562937"
"""The attribute under which verl's programs find the modes of a method, as a dict."""


def attributes_of(method: object) -> dict[str, Any] | None:
    """Return the modes of a registered method as `register` was given them, else None."""
    given = getattr(method, MAGIC_ATTR, None)
    if isinstance(given, dict):
        return given
    record = record_of(method)
    if record is None:
        return None
    modes = {"dispatch_mode": record.dispatch_mode, "execute_mode": record.execute_mode}
    return {**modes, "blocking": record.blocking}


for _method in vars(single_controller.Worker).values():  # verl's `Worker` has these too
    if record_of(_method) is not None:
        setattr(_method, MAGIC_ATTR, attributes_of(_method))


def _view(worker_group: GroupInfo) -> GroupView:
    """Return the view of a call. If one rank runs it, it is split for all ranks, as in verl."""
    every = range(worker_group.world_size)
    if not isinstance(worker_group, GroupView):
        return GroupView(worker_group, every, "dispatch")
    if not worker_group.single:
        return worker_group
    view = GroupView(worker_group.group, every, worker_group.method)
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


collect_dp_compute = collect_all_to_all


def dispatch_dp_compute_data_proto(
    worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch into one part per rank. `padding` says how rows are added."""
    view = _view(worker_group)
    return _listed(worker_group, view, dispatch.dispatch_batches(view, *args, **kwargs))


def dispatch_dp_compute_data_proto_with_func(
    worker_group: GroupInfo, function: Callable[..., object], *args: object, **kwargs: object
) -> Split:
    """Send `function` to every rank and split every batch into one part per rank."""
    view = _view(worker_group)
    split = dispatch.dispatch_function_and_batches(view, function, *args, **kwargs)
    return _listed(worker_group, view, split)


def _listed(worker_group: GroupInfo, view: GroupView, split: Split) -> Split:
    """Return split arguments with a list of the positional ones, as these functions of verl do."""
    args, kwargs = split if isinstance(worker_group, GroupView) else with_count(view, split)
    return cast(Split, (list(args), kwargs))


def _by_part(worker_group: GroupInfo, view: GroupView, split: Split) -> Split:
    return split if isinstance(worker_group, GroupView) else with_uneven_parts(view, split)


def collect_dp_compute_data_proto(worker_group: GroupInfo, output: list[object]) -> object:
    """Concatenate the batches of the ranks and remove the padding."""
    return collect_later(dispatch.collect_joined, _view(worker_group), output)


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: list[int],
    dp_size: int,
    worker_group: GroupInfo,
    *args: object,
    **kwargs: object,
) -> Split:
    """Split every batch by data-parallel rank. Rank r receives part `dp_rank_mapping[r]`."""
    view = _view(worker_group)
    split = dispatch.split_by_part(view, dp_rank_mapping, args, kwargs)
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
    return collect_later(dispatch.collect_joined, _view(worker_group), chosen)


def dispatch_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, *args: object, **kwargs: object
) -> Split:
    """Split every batch by data-parallel rank of a mesh that the workers registered."""
    view = _view(worker_group)
    split = dispatch.mesh_scheme(mesh_name).dispatch_batches(view, *args, **kwargs)
    return _by_part(worker_group, view, split)


def collect_lazy_compute_data_proto(
    mesh_name: str, worker_group: GroupInfo, output: list[object]
) -> object:
    """Concatenate the batches of the collecting ranks of a mesh."""
    collect_fn = dispatch.mesh_scheme(mesh_name).collect_batches
    return collect_later(collect_fn, _view(worker_group), output)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return the dispatch mode of a mesh. Both functions take a group, or a view of one."""
    return {
        "dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": partial(collect_lazy_compute_data_proto, mesh_name),
    }


def dummy_direct_rollout_call(worker_group: GroupInfo, *args: object, **kwargs: object) -> None:
    """Raise DirectCallError: methods of DIRECT_ROLLOUT_METHOD are not called through a group."""
    dispatch.refuse_direct_call(_view(worker_group), *args, **kwargs)


def get_predefined_execute_fn(execute_mode: ExecuteMode) -> dict[str, str]:
    """Return the name of the group's method that runs calls of this mode.

    It is `execute_` and the name of the mode: `execute_first_half` for `Execute.FIRST_HALF`.
    """
    return {"execute_fn_name": f"execute_{execute_mode.name.lower()}"}


def init_predefined_dispatch_mode() -> None:
    """Do nothing: the built-in modes exist from the start."""


init_predefined_execute_mode = init_predefined_dispatch_mode


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
        modes = {"dispatch_mode": given, "execute_mode": execute_mode, "blocking": blocking}
        setattr(mark(function), MAGIC_ATTR, modes)
        return function

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
_BATCHES = (dispatch_dp_compute_data_proto, collect_dp_compute_data_proto)
_FUNCTIONS: dict[str, tuple[DispatchFn, CollectFn]] = {
    "ONE_TO_ALL": (dispatch_one_to_all, collect_all_to_all),
    "ALL_TO_ALL": (cast(DispatchFn, dispatch_all_to_all), collect_all_to_all),
    "DP_COMPUTE": (dispatch_dp_compute, collect_dp_compute),
    "DP_COMPUTE_PROTO": _BATCHES,
    "DP_COMPUTE_PROTO_WITH_FUNC": (dispatch_dp_compute_data_proto_with_func, _BATCHES[1]),
    "DP_COMPUTE_METRIC": (_BATCHES[0], collect_dp_compute),
}
"""The functions of this module that verl's modes have."""


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> ModeFunctions:
    """Return the two functions of a mode. Both take a group, or a view of one."""
    functions, name = functions_of_mode(dispatch_mode), dispatch_mode.name
    if Dispatch[name] is not _BUILT_IN.get(name):
        return functions
    split, join = _FUNCTIONS.get(name) or (
        _for_group(_dispatch_for_group, functions["dispatch_fn"]),
        _for_group(_collect_for_group, functions["collect_fn"]),
    )
    return {"dispatch_fn": split, "collect_fn": join}


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


def _megatron(name: str) -> tuple[DispatchFn, CollectFn]:
    functions = get_predefined_dispatch_fn(Dispatch[name])
    return functions["dispatch_fn"], functions["collect_fn"]


dispatch_megatron_compute, collect_megatron_compute = _megatron("MEGATRON_COMPUTE")
dispatch_megatron_compute_data_proto = _megatron("MEGATRON_COMPUTE_PROTO")[0]
collect_megatron_compute_data_proto = _megatron("MEGATRON_COMPUTE_PROTO")[1]
dispatch_megatron_pp_as_dp, collect_megatron_pp_as_dp = _megatron("MEGATRON_PP_AS_DP")
dispatch_megatron_pp_as_dp_data_proto = _megatron("MEGATRON_PP_AS_DP_PROTO")[0]
collect_megatron_pp_as_dp_data_proto = _megatron("MEGATRON_PP_AS_DP_PROTO")[1]
dispatch_megatron_pp_only, collect_megatron_pp_only = _megatron("MEGATRON_PP_ONLY")

__all__ = ["DISPATCH_MODE_FN_REGISTRY", "MAGIC_ATTR", "Dispatch", "Execute"]


Columns: TypeAlias = tuple[Arguments, KeywordArguments]
"""(args, kwargs) of an execute function: usually a list with one entry per rank each."""


def columns_of(
    view: GroupView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
) -> Columns:
    """Return what the dispatch function of a mode makes of the arguments of a call.

    Raises `DispatchError` if a function of the user's returned no pair (args, kwargs).
    """
    split: object = _function_of(mode)(view, *args, **kwargs)
    try:
        split_args, split_kwargs = cast(Columns, split)
        return tuple(split_args), dict(split_kwargs)
    except (TypeError, ValueError):
        raise DispatchError(
            f"{view.method}: a dispatch function returns (args, kwargs), got {split!r}."
        ) from None


def parts_of(view: GroupView, mode: DispatchMode, columns: Columns) -> list[Part]:
    """Return the arguments of each executing rank, by the table above.

    The functions of Quadriga's modes return one entry per executing rank, and so must every
    function if the execute mode chooses some ranks. Raises `DispatchError` or `LengthError` if it
    returns something else.
    """
    n = len(view.ranks)
    chosen = mode.ranks is not None or (n < view.world_size and not view.single)
    if chosen or (view.single and _is_of_quadriga(_function_of(mode))):
        return parts_of_ranks(view, cast(Split, columns))
    args, kwargs = columns
    every = (*args, *kwargs.values())
    if not view.single and all(isinstance(v, list) and len(v) == n for v in every):
        return parts_of_ranks(view, cast(Split, columns))
    return [columns] * n


def _function_of(mode: DispatchMode) -> DispatchFn:
    """Return the dispatch function of a mode in verl's groups."""
    # The other built-in modes have one meaning in both libraries.
    if mode.name in ("ONE_TO_ALL", "ALL_TO_ALL"):
        return get_predefined_dispatch_fn(mode)["dispatch_fn"]
    return mode.dispatch_fn


def _is_of_quadriga(function: DispatchFn) -> bool:
    plain = function.func if isinstance(function, partial) else function
    return getattr(plain, "__module__", "").startswith("quadriga.single_controller.")
