"""Refuse calls in which a mode that splits batches finds no batch, but would repeat one.

f([batch])    a container with a batch, a row, a future or a reference: every rank would work on
              all rows, and the joined result would have them once for each rank
f(iterator)   the rank that reads it first would get all items
f(None)       every rank would work without data
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from quadriga.errors import DispatchError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.single_controller.call import Arguments, GroupView, KeywordArguments

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
