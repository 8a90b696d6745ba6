"""Splitting and joining batches for the dispatch modes.

A batch is a `DataProto`, a `DataProtoFuture` or a `TensorDict`. Nothing here loads them: a value
can only be one of them if `tensordict` has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from quadriga.errors import DispatchError, LengthError
from quadriga.single_controller.call import GroupView

if TYPE_CHECKING:
    from tensordict import TensorDict

    from quadriga.protocol import DataProto, DataProtoFuture


@cache
def _types() -> tuple[type[DataProto], type[DataProtoFuture], type[TensorDict]]:
    from tensordict import TensorDict

    from quadriga.protocol import DataProto, DataProtoFuture

    return DataProto, DataProtoFuture, TensorDict


def is_batch(value: object) -> bool:
    """Whether a dispatch mode that splits batches would split this value."""
    return "tensordict" in sys.modules and isinstance(value, _types())


def split_arguments(
    view: GroupView, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int
) -> tuple[tuple[list[Any], ...], dict[str, list[Any]]]:
    """Split every batch into `parts` pieces; any other value goes whole to each part.

    Batches with padding enabled are filled up with copies of their own rows; the number of rows
    added is left in `view.memo` for `join`. Raises LengthError where a batch does not divide.
    """
    if not args and not kwargs:
        return (), {}
    padding = _Padding(view, parts)
    split_args = tuple(_split(padding, f"argument {i}", a) for i, a in enumerate(args))
    split_kwargs = {name: _split(padding, f"argument {name!r}", a) for name, a in kwargs.items()}
    return split_args, split_kwargs


class _Padding:
    """The one padding of a call, agreed on by all its batches."""

    def __init__(self, view: GroupView, parts: int) -> None:
        self.view, self.parts = view, parts

    def agree(self, where: str, rows: int, pad: int) -> None:
        seen = self.view.memo.setdefault("padding", (rows, pad))
        if seen != (rows, pad):
            raise LengthError(
                f"{self.view.method}: {where} has {rows} rows and needs padding of {pad} for "
                f"{self.parts} parts, another batch of the same call has {seen[0]} rows and needs "
                f"{seen[1]}. Batches of one padded call must be of one length."
            )


def _split(padding: _Padding, where: str, value: Any) -> list[Any]:
    parts = padding.parts
    if not is_batch(value):
        return [value] * parts
    data_proto, future, _ = _types()
    if isinstance(value, future):
        arrived = value.arrived()
        if arrived is None or len(arrived) % parts:
            return _checked_chunk(padding, where, value.chunk)
        value = arrived  # each rank then gets its own blocks, and not the whole future
    rows = len(value)
    pad = -rows % parts
    if pad and isinstance(value, data_proto) and value.is_padding_enabled():
        from quadriga.protocol import pad_dataproto_to_divisor

        padding.agree(where, rows, pad)
        value, _ = pad_dataproto_to_divisor(value, parts)
        rows += pad
    if rows % parts:
        raise LengthError(
            f"{padding.view.method}: {where} has {rows} rows, which do not divide into {parts} "
            f"equal parts. Pass {rows - rows % parts} or {rows + parts - rows % parts} rows, or "
            "enable padding (auto_padding=True)."
        )
    if isinstance(value, data_proto):
        return list(value.chunk(parts))
    return list(value.split(rows // parts)) if rows else [value] * parts


def _checked_chunk(
    padding: _Padding, where: str, chunk: Callable[[int], Iterable[Any]]
) -> list[Any]:
    pieces = list(chunk(padding.parts))
    if len(pieces) != padding.parts:
        raise LengthError(
            f"{padding.view.method}: {where} was split into {len(pieces)} parts, "
            f"expected {padding.parts}."
        )
    return pieces


def join(view: GroupView, outputs: Sequence[Any]) -> Any:
    """Join per-rank batches in order and take off the padding. All None joins to None.

    Raises DispatchError if the ranks returned anything else.
    """
    if all(output is None for output in outputs):
        return None
    if not all(is_batch(output) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise DispatchError(
            f"{view.method} must return a batch (DataProto, TensorDict) or None from every rank "
            f"to be joined, got {', '.join(kinds)}. Use Dispatch.DP_COMPUTE_METRIC to get a list "
            "of results."
        )
    return _without_padding(view, _concat(list(outputs)))


def _concat(outputs: list[Any]) -> Any:
    data_proto, future, _ = _types()
    if isinstance(outputs[0], data_proto):
        return data_proto.concat(outputs)
    if isinstance(outputs[0], future):
        return future.concat(outputs)
    import torch

    return torch.cat(outputs, dim=0)


def _without_padding(view: GroupView, joined: Any) -> Any:
    rows, pad = view.memo.get("padding", (0, 0))
    if not pad:
        return joined
    factor, rest = divmod(len(joined), rows + pad)
    if rest or not factor:
        return joined
    # A method may return several rows for each one it got (a rollout with n samples): the rows
    # made from padding are then the last pad · factor.
    return joined.slice(0, rows * factor) if hasattr(joined, "slice") else joined[: rows * factor]
