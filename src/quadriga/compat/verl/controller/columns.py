"""Which rank receives what in a call of verl's groups.

A dispatch function of verl returns (args, kwargs), and an execute function decides what they mean:

    all ranks    each argument is a list with world_size entries    rank i: entry i of each
                 otherwise                                          every rank: all of them, whole
    rank zero                                                       rank zero: all of them, whole

Example with 2 ranks: `[3, 4], k=[5, 6]` is split, `[3, 4], k=5` is not, and neither is `(3, 4)`.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias, cast

from quadriga.compat.verl.controller.decorator import get_predefined_dispatch_fn
from quadriga.errors import DispatchError
from quadriga.single_controller.bound_method import Part, parts_of_ranks
from quadriga.single_controller.call import Arguments, CallView, DispatchFn, KeywordArguments, Split
from quadriga.single_controller.dispatch import DispatchMode

Columns: TypeAlias = tuple[Arguments, KeywordArguments]
"""(args, kwargs) of an execute function: usually a list with one entry per rank each."""


def columns_of(
    view: CallView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
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


def parts_of(view: CallView, mode: DispatchMode, columns: Columns) -> list[Part]:
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
