"""Dispatch by batch rows: over the ranks of a group, or over the data-parallel ranks of a mesh.

Example: 8 ranks with tp=2 (inner) and dp=4, a batch of 8 rows, `dispatch_info` of the mesh
`[0, 0, 1, 1, 2, 2, 3, 3]`, `collect_info` `[T, F, T, F, T, F, T, F]`:

    rows    0 1     2 3     4 5     6 7          4 = max(dispatch_info) + 1 parts
    part     0       1       2       3
            / \\     / \\     / \\     / \\         ranks of one part receive the same object,
    rank   0   1   2   3   4   5   6   7         which is sent once
           |       |       |       |             only collecting ranks contribute
    result rows of part 0, 1, 2, 3, joined in this order

A batch is a `DataProto`, a `DataProtoFuture` or a `TensorDict`. This module does not import them
when it loads: a value can only be a batch if `tensordict` is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from quadriga.errors import DispatchError, LengthError, MeshError
from quadriga.single_controller.call import Arguments, GroupView, KeywordArguments, Split
from quadriga.single_controller.dispatch.modes import ModeFunctions

if TYPE_CHECKING:
    from tensordict import TensorDict
    from typing_extensions import TypeIs

    from quadriga.protocol import DataProto, DataProtoFuture

    Batch = DataProto | DataProtoFuture | TensorDict


@cache
def _types() -> tuple[type[DataProto], type[DataProtoFuture], type[TensorDict]]:
    from tensordict import TensorDict

    from quadriga.protocol import DataProto, DataProtoFuture

    return DataProto, DataProtoFuture, TensorDict


def is_batch(value: object) -> TypeIs[Batch]:
    """Return whether a dispatch mode that splits batches splits this value."""
    return "tensordict" in sys.modules and isinstance(value, _types())


# The modes of a mesh


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return the dispatch mode of a mesh, for `@register(dispatch_mode=...)`."""
    return {
        "dispatch_fn": partial(dispatch_by_mesh, mesh_name),
        "collect_fn": partial(collect_by_mesh, mesh_name),
    }


def dispatch_by_mesh(mesh_name: str, view: GroupView, *args: object, **kwargs: object) -> Split:
    """Split every batch by data-parallel rank. Every rank receives any other argument whole."""
    view.collect_info(mesh_name)  # the view must know it before a future with the view is pickled
    return split_by_part(view, view.dispatch_info(mesh_name), args, kwargs)


def collect_by_mesh(mesh_name: str, view: GroupView, outputs: object) -> object:
    """Join the results of the collecting ranks in the order of data-parallel ranks."""
    if not isinstance(outputs, list):
        return outputs
    chosen = select_parts(
        view, view.dispatch_info(mesh_name), view.collect_info(mesh_name), outputs
    )
    return join(view, chosen)


def split_by_part(
    view: GroupView, part_of_rank: Sequence[int], args: Arguments, kwargs: KeywordArguments
) -> Split:
    """Split batches into max(part_of_rank) + 1 parts. Rank r receives part `part_of_rank[r]`."""
    if not args and not kwargs:
        return (), {}
    split_args, split_kwargs = split_arguments(view, args, kwargs, max(part_of_rank) + 1)
    # `pieces[part]` is one object for all ranks of a part, which `build_calls` packs once.
    mine = [part_of_rank[rank] for rank in view.ranks]
    return (
        tuple([pieces[part] for part in mine] for pieces in split_args),
        {name: [pieces[part] for part in mine] for name, pieces in split_kwargs.items()},
    )


def select_parts(
    view: GroupView,
    part_of_rank: Sequence[int],
    collects: Sequence[bool],
    outputs: Sequence[object],
) -> list[object]:
    """Return the results of the collecting ranks, one per part, in the order of the parts.

    `part_of_rank` and `collects` have one entry per rank of the group, `outputs` one per executing
    rank. Raise MeshError if two ranks collect for one part.
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
    return [chosen[part] for part in sorted(chosen)]


def check_mesh(mesh_name: str, dp_ranks: Sequence[int], collects: Sequence[bool]) -> None:
    """Check what the ranks of a group registered for one mesh.

    Raise MeshError unless the data-parallel ranks are 0..n-1 without a gap, each is collected from
    at most one rank, and at least one rank collects.
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


def dispatch_batches(view: GroupView, *args: object, **kwargs: object) -> Split:
    """Split every batch into one part per rank. Every rank receives any other argument whole."""
    return split_arguments(view, args, kwargs, len(view.ranks))


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
    view: GroupView, args: Arguments, kwargs: KeywordArguments, parts: int
) -> Split:
    """Split every batch into `parts` parts of equal length. Repeat any other value.

    A batch with padding enabled is filled with copies of its own rows. The number of rows that
    were added is stored in `view.memo` for `join`. Raise LengthError if another batch does not
    divide, or if two batches of the call need different padding.
    """
    if not args and not kwargs:
        return (), {}
    split_args = tuple(_split(view, parts, f"argument {i}", a) for i, a in enumerate(args))
    split_kwargs = {
        name: _split(view, parts, f"argument {name!r}", a) for name, a in kwargs.items()
    }
    return split_args, split_kwargs


def _split(view: GroupView, parts: int, where: str, value: object) -> Sequence[object]:
    if not is_batch(value):
        return [value] * parts
    from quadriga.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor

    if isinstance(value, DataProtoFuture):
        arrived = value.arrived()
        # Parts of a received batch are sent as their own rows, parts of a future as the whole
        # future, of which the rank takes its rows.
        return (value if arrived is None or len(arrived) % parts else arrived).chunk(parts)
    rows = len(value)
    pad = -rows % parts
    if pad and isinstance(value, DataProto) and value.is_padding_enabled():
        _agree_on_padding(view, parts, where, rows, pad)
        value, _ = pad_dataproto_to_divisor(value, parts)
        rows += pad
    if rows % parts:
        raise LengthError(
            f"{view.method}: {where} has {rows} rows, which do not divide into {parts} equal "
            f"parts. Pass {rows - rows % parts} or {rows + parts - rows % parts} rows, or enable "
            "padding (auto_padding=True)."
        )
    if isinstance(value, DataProto):
        return list(value.chunk(parts))
    # A TensorDict of 0 rows cannot be split into pieces of 0 rows.
    return list(value.split(rows // parts)) if rows else [value] * parts


@dataclass(frozen=True)
class _Padding:
    """The padding of the batches of one call: `pad` rows after `rows` rows."""

    rows: int
    pad: int


def _agree_on_padding(view: GroupView, parts: int, where: str, rows: int, pad: int) -> None:
    """Record the padding of a call. All padded batches of a call must have the same length."""
    seen = view.memo.setdefault("padding", _Padding(rows, pad))
    if isinstance(seen, _Padding) and seen != _Padding(rows, pad):
        raise LengthError(
            f"{view.method}: {where} has {rows} rows and needs {pad} padding rows for {parts} "
            f"parts, another batch of the same call has {seen.rows} rows and needs {seen.pad}. "
            "Batches of one padded call must have the same length."
        )


# Join


def join(view: GroupView, outputs: Sequence[object]) -> object:
    """Join one batch per part in order and remove the padding. Return None if all are None.

    Raise DispatchError if the ranks returned anything else, or batches of different classes.
    """
    if all(output is None for output in outputs):
        return None
    if is_batch(outputs[0]):
        from tensordict import TensorDict

        from quadriga.protocol import DataProto, DataProtoFuture

        protos = [output for output in outputs if isinstance(output, DataProto)]
        if len(protos) == len(outputs):
            return _without_padding(view, DataProto.concat(protos))
        tensordicts = [output for output in outputs if isinstance(output, TensorDict)]
        if len(tensordicts) == len(outputs):
            return _without_padding(view, TensorDict.cat(tensordicts, dim=0))
        futures = [output for output in outputs if isinstance(output, DataProtoFuture)]
        if len(futures) == len(outputs):
            return DataProtoFuture.concat(futures)
    kinds = sorted({type(output).__name__ for output in outputs})
    raise DispatchError(
        f"{view.method} must return a batch (DataProto, TensorDict) or None from every rank to be "
        f"joined, got {', '.join(kinds)}. Use Dispatch.DP_COMPUTE_METRIC to get a list of results."
    )


BatchT = TypeVar("BatchT", "DataProto", "TensorDict")


def _without_padding(view: GroupView, joined: BatchT) -> BatchT:
    padding = view.memo.get("padding")
    if not isinstance(padding, _Padding):
        return joined
    factor, rest = divmod(len(joined), padding.rows + padding.pad)
    if rest or not factor:
        return joined
    # A method may return several rows for each row that it received (a rollout with n samples per
    # prompt): the rows made from padding are then the last pad · factor.
    kept: BatchT = joined[: padding.rows * factor]
    return kept
