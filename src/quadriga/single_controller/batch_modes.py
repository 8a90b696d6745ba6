"""Dispatch by batch rows: over the ranks of a group, or over the data-parallel ranks of a mesh.

Example: 8 ranks with tp=2 (inner) and dp=4, a batch of 8 rows, `dispatch_info` of the mesh
`[0, 0, 1, 1, 2, 2, 3, 3]`, `collect_info` `[T, F, T, F, T, F, T, F]`:

    rows    0 1     2 3     4 5     6 7          4 = max(dispatch_info) + 1 parts
    part     0       1       2       3
            / \     / \     / \     / \         ranks of one part receive the same object,
    rank   0   1   2   3   4   5   6   7         which is sent once
           |       |       |       |             only collecting ranks contribute
    result rows of part 0, 1, 2, 3, joined in this order

A batch is a `DataProto`, a `DataProtoFuture` or a `TensorDict`. This module does not import them
when it loads: a value can only be a batch if `tensordict` is imported already. A reference of a
backend (Ray's `ObjectRef`) is split as the future of its object.

A call in which such a mode finds no batch, but would repeat one, is refused:

f([batch])    a container with a batch, a row, a future or a reference: every rank would work on
              all rows, and the joined result would have them once for each rank
f(iterator)   the rank that reads it first would get all items
f(None)       every rank would work without data
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NoReturn, TypeVar

from quadriga.errors import DispatchError, LengthError, MeshError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.single_controller.call import (
    Arguments,
    GroupView,
    KeywordArguments,
    ModeFunctions,
    Split,
)

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase
    from typing_extensions import TypeIs

    from quadriga.protocol import DataProto, DataProtoFuture

    Batch = DataProto | DataProtoFuture | TensorDictBase
    AsFuture = Callable[[object], DataProtoFuture]

IsBatch = Callable[[object], bool]

_PLAIN = frozenset(PLAIN_TYPES)


def check_unsplit(
    view: GroupView, args: Arguments, kwargs: KeywordArguments, is_batch: IsBatch
) -> None:
    """Check the arguments of a call, none of which is a batch. Raises `DispatchError`.

    `is_batch(value)`: whether the mode splits a value.
    """
    named: dict[str, object] = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    if all(value is None for value in named.values()):
        _refuse(
            view,
            "None. Leave the argument out, or register the method with Dispatch.ONE_TO_ALL if it "
            "needs no batch.",
        )
    for where, value in named.items():
        title = f"{where} of type {type(value).__name__}"
        if isinstance(value, Iterator):
            _refuse(
                view,
                f"{title}, whose items one rank could read. Pass one batch: "
                "DataProto.concat(list(...)).",
            )
        held = _held_batch(value, is_batch)
        if held is value and held is not None:
            _refuse(view, f"{where}, one row of a batch. Pass a batch of one row: data[0:1].")
        if held is not None:
            _refuse(
                view,
                f"{title} with a {type(held).__name__} inside, of which every rank would receive "
                "all rows. Pass the batch itself, DataProto.concat or DataProtoFuture.concat of "
                "several, or register the method with Dispatch.ONE_TO_ALL.",
            )


def _refuse(view: GroupView, got: str) -> NoReturn:
    raise DispatchError(
        f"{view.method}: expected a batch to split (DataProto, DataProtoFuture, TensorDict), got "
        f"{got}"
    )


def _held_batch(value: object, is_batch: IsBatch) -> object:
    """Return the first batch, row of a batch or reference in nested containers, else None."""
    items: Iterator[object]
    if is_batch(value) or _is_row(value):  # before its items: a TensorDict is a Mapping
        return value
    if isinstance(value, list | tuple | set | frozenset):
        if _PLAIN.issuperset(map(type, value)):  # a list of token ids, in 10 ns an item
            return None
        items = iter(value)
    elif isinstance(value, Mapping):
        items = iter(value.values())
    else:
        return None
    found = (_held_batch(item, is_batch) for item in items)
    return next((held for held in found if held is not None), None)


def _is_row(value: object) -> bool:
    contents = sys.modules.get("quadriga.protocol.contents")
    return contents is not None and isinstance(value, contents.DataProtoItem)


_REFERENCES: dict[type, AsFuture] = {}
"""Class of a backend's references → the function that makes a future of one."""


def register_reference(kind: type, as_future: AsFuture) -> None:
    """Make the modes that split batches split the objects to which references of a class refer.

    `as_future(reference)` returns a future, whose parts are the object itself if it is no batch.
    """
    _REFERENCES[kind] = as_future


@cache
def _types() -> tuple[type[DataProto], type[DataProtoFuture], type[TensorDictBase]]:
    from tensordict import TensorDictBase

    from quadriga.protocol import DataProto, DataProtoFuture

    return DataProto, DataProtoFuture, TensorDictBase


def is_batch(value: object) -> TypeIs[Batch]:
    """Return whether a value is a batch, or the future of one."""
    return "tensordict" in sys.modules and isinstance(value, _types())


def is_split(value: object) -> bool:
    """Return whether a dispatch mode that splits batches splits this value."""
    return is_batch(value) or type(value) in _REFERENCES


# The modes of a mesh


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return the dispatch mode of a mesh, for `@register(dispatch_mode=...)`."""
    return {
        "dispatch_fn": partial(dispatch_by_mesh, mesh_name),
        "collect_fn": partial(collect_by_mesh, mesh_name),
    }


def uneven_dispatch_mode(mesh_name: str | None = None) -> ModeFunctions:
    """Return a dispatch mode that splits any number of rows without padding.

    For `@register(dispatch_mode=...)`, as `DP_COMPUTE_PROTO`, or as the mode of a mesh. 5 rows are
    split into parts of 3 and 2 rows for two ranks, of 2, 1, 1 and 1 for four; with fewer rows than
    parts the last parts are empty. The ranks must not run collectives whose number depends on the
    number of their rows. A batch with padding enabled is padded as in other modes.
    """
    if mesh_name is None:
        return {"dispatch_fn": dispatch_uneven_batches, "collect_fn": collect_joined}
    return {
        "dispatch_fn": partial(dispatch_uneven_by_mesh, mesh_name),
        "collect_fn": partial(collect_by_mesh, mesh_name),
    }


def dispatch_by_mesh(mesh_name: str, view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Split every batch by data-parallel rank. Every rank receives any other argument whole."""
    view.collect_info(mesh_name)  # the view must know it before a future with the view is pickled
    return split_by_part(view, view.dispatch_info(mesh_name), args, kwargs)


def dispatch_uneven_by_mesh(
    mesh_name: str, view: GroupView, /, *args: object, **kwargs: object
) -> Split:
    """Split as `dispatch_by_mesh` does, but into parts whose lengths may differ by one."""
    view.collect_info(mesh_name)
    return split_by_part(view, view.dispatch_info(mesh_name), args, kwargs, uneven=True)


def collect_by_mesh(mesh_name: str, view: GroupView, outputs: object) -> object:
    """Join the results of the collecting ranks in the order of data-parallel ranks."""
    if not isinstance(outputs, list):
        return outputs
    return join_parts(view, view.dispatch_info(mesh_name), view.collect_info(mesh_name), outputs)


def split_by_part(
    view: GroupView,
    part_of_rank: Sequence[int],
    args: Arguments,
    kwargs: KeywordArguments,
    uneven: bool = False,
) -> Split:
    """Split batches into max(part_of_rank) + 1 parts. Rank r receives part `part_of_rank[r]`."""
    if not args and not kwargs:
        return (), {}
    split_args, split_kwargs = split_arguments(view, args, kwargs, max(part_of_rank) + 1, uneven)
    # `pieces[part]` is one object for all ranks of a part, which `build_calls` packs once.
    mine = [part_of_rank[rank] for rank in view.ranks]
    return (
        tuple([pieces[part] for part in mine] for pieces in split_args),
        {name: [pieces[part] for part in mine] for name, pieces in split_kwargs.items()},
    )


def join_parts(
    view: GroupView,
    part_of_rank: Sequence[int],
    collects: Sequence[bool],
    outputs: Sequence[object],
) -> object:
    """Join the results of the collecting ranks, one batch per part, in the order of the parts."""
    chosen = select_parts(view, part_of_rank, collects, outputs)
    return join(view, list(chosen.values()), list(chosen))


def select_parts(
    view: GroupView,
    part_of_rank: Sequence[int],
    collects: Sequence[bool],
    outputs: Sequence[object],
) -> dict[int, object]:
    """Return the results of the collecting ranks as part → result, in the order of the parts.

    `part_of_rank` and `collects` have one entry per rank of the group, `outputs` one per executing
    rank. Raises `MeshError` if two ranks collect for one part.
    """
    chosen: dict[int, object] = {}
    for rank, output in zip(view.ranks, outputs, strict=True):
        if not collects[rank]:
            continue
        part = part_of_rank[rank]
        if part in chosen:
            raise MeshError(
                f"{view.method}: two ranks collect for data-parallel rank {part}. Exactly one of "
                "the ranks that share a data-parallel rank may register is_collect=True."
            )
        chosen[part] = output
    return {part: chosen[part] for part in sorted(chosen)}


def check_mesh(mesh_name: str, dp_ranks: Sequence[int], collects: Sequence[bool]) -> None:
    """Check what the ranks of a group registered for one mesh.

    Raises `MeshError` unless the data-parallel ranks are 0..n-1 without a gap, each is collected
    from at most one rank, and at least one rank collects.
    """
    expected = set(range(max(dp_ranks) + 1))
    if set(dp_ranks) != expected:
        raise MeshError(
            f"Mesh {mesh_name!r}: data-parallel ranks must cover 0..{max(dp_ranks)}, the workers "
            f"registered {list(dp_ranks)}.",
            mesh_name=mesh_name,
        )
    collected = [dp for dp, is_collect in zip(dp_ranks, collects, strict=True) if is_collect]
    if not collected or len(set(collected)) != len(collected):
        raise MeshError(
            f"Mesh {mesh_name!r}: each data-parallel rank may be collected from one rank, and at "
            f"least one must be; the collecting ranks registered {collected}.",
            mesh_name=mesh_name,
        )


# The modes of all ranks


def dispatch_batches(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Split every batch into one part per rank. Every rank receives any other argument whole."""
    return split_arguments(view, args, kwargs, len(view.ranks))


def dispatch_uneven_batches(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Split as `dispatch_batches` does, but into parts whose lengths may differ by one."""
    return split_arguments(view, args, kwargs, len(view.ranks), uneven=True)


def dispatch_function_and_batches(
    view: GroupView, function: object, *args: object, **kwargs: object
) -> Split:
    """Send a function to every rank, and split the batches that follow it."""
    if not callable(function):
        raise DispatchError(
            f"{view.method}: the first argument must be a function, got {type(function).__name__}."
        )
    n = len(view.ranks)
    split_args, split_kwargs = split_arguments(view, args, kwargs, n)
    return ([function] * n, *split_args), split_kwargs


def collect_joined(view: GroupView, outputs: object) -> object:
    """Join batches in rank order and remove the padding."""
    return join(view, outputs) if isinstance(outputs, list) else outputs


# Split


def split_arguments(
    view: GroupView,
    args: Arguments,
    kwargs: KeywordArguments,
    parts: int,
    uneven: bool = False,
) -> Split:
    """Split every batch into `parts` parts of equal length. Repeat any other value.

    A batch with padding enabled is filled with copies of its own rows, which `join` removes (see
    `padding`). Another batch that does not divide is split into parts whose lengths differ by one
    if `uneven` is set. Raises `LengthError` if it is not set, or if two batches of the call need
    different padding, `DispatchError` for the arguments that `check_unsplit` refuses.
    """
    if not args and not kwargs:
        return (), {}
    if not any(map(is_split, args)) and not any(map(is_split, kwargs.values())):
        check_unsplit(view, args, kwargs, is_split)
    split_args = tuple(_split(view, parts, f"argument {i}", a, uneven) for i, a in enumerate(args))
    split_kwargs = {
        name: _split(view, parts, f"argument {name!r}", a, uneven) for name, a in kwargs.items()
    }
    return split_args, split_kwargs


def _split(
    view: GroupView, parts: int, where: str, argument: object, uneven: bool
) -> Sequence[object]:
    as_future = _REFERENCES.get(type(argument))
    value = argument if as_future is None else as_future(argument)
    if not is_batch(value):
        return [value] * parts
    from quadriga.protocol import DataProto, DataProtoFuture
    from quadriga.protocol.boundary import Part

    if isinstance(value, DataProtoFuture):
        arrived = value.arrived()
        # Parts of a received batch are sent as their own rows, parts of a future as the whole
        # future, of which the rank takes its rows.
        if arrived is None or (len(arrived) % parts and not arrived.is_padding_enabled()):
            return value.chunk(parts, uneven)
        value = arrived
    if len(value) % parts and isinstance(value, DataProto) and value.is_padding_enabled():
        from quadriga.single_controller.padding import add_padding

        value = add_padding(view, where, value, parts)
    rows = len(value)
    if rows % parts and uneven:
        return [Part(i, parts, uneven).of(value) for i in range(parts)]
    if rows % parts:
        raise LengthError(
            f"{view.method}: {where} has {rows} rows, which do not divide into {parts} equal "
            f"parts. Pass {rows - rows % parts} or {rows + parts - rows % parts} rows, enable "
            "padding (auto_padding=True), or register the method with uneven_dispatch_mode()."
        )
    if isinstance(value, DataProto):
        return list(value.chunk(parts))
    # A TensorDict of 0 rows cannot be split into pieces of 0 rows.
    return list(value.split(rows // parts)) if rows else [value] * parts


# Join


def join(view: GroupView, outputs: Sequence[object], parts: Sequence[int] | None = None) -> object:
    """Join batches in order and remove the padding. Return None if all outputs are None.

    `parts`: the part of which each output is the result; None: 0, 1, 2, …. Raises `DispatchError`
    if the ranks returned anything else, or batches of different classes.
    """
    if all(output is None for output in outputs):
        return None
    if is_batch(outputs[0]):
        from tensordict import TensorDict

        from quadriga.protocol import DataProto, DataProtoFuture

        protos = [output for output in outputs if isinstance(output, DataProto)]
        if len(protos) == len(outputs):
            return DataProto.concat(_without_padding(view, protos, parts))
        tensordicts = [output for output in outputs if isinstance(output, TensorDict)]
        if len(tensordicts) == len(outputs):
            return TensorDict.cat(_without_padding(view, tensordicts, parts), dim=0)
        futures = [output for output in outputs if isinstance(output, DataProtoFuture)]
        if len(futures) == len(outputs):
            return DataProtoFuture.concat(futures)
    kinds = sorted({type(output).__name__ for output in outputs})
    raise DispatchError(
        f"{view.method} must return a batch (DataProto, TensorDict) or None from every rank to be "
        f"joined, got {', '.join(kinds)}. Use Dispatch.DP_COMPUTE_METRIC to get a list of results."
    )


BatchT = TypeVar("BatchT", "DataProto", "TensorDict")


def _without_padding(
    view: GroupView, outputs: list[BatchT], parts: Sequence[int] | None
) -> list[BatchT]:
    padding = view.memo.get("padding")
    if padding is None:
        return outputs
    from quadriga.single_controller.padding import Padding, remove_padding

    if not isinstance(padding, Padding):  # a dispatch function of the user's uses the same key
        return outputs
    return [
        remove_padding(view, padding, part, output)
        for part, output in zip(parts or range(len(outputs)), outputs, strict=True)
    ]
