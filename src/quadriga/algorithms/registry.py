"""What an entry of a table is, and how a user's own file adds one.

The tables themselves are literal dicts: `advantages.ADVANTAGES`, `policy_losses.POLICY_LOSSES`.
What an entry needs and reads is told by its function's signature, so it cannot disagree with it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from quadriga.errors import InputError, UnknownNameError, UnknownSettingError

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], name: str, kind: str) -> Entry:
    """The entry of that name. Raises `UnknownNameError` with the nearest name."""
    if name in table:
        return table[name]
    nearest = next(iter(difflib.get_close_matches(str(name), table, n=1)), None)
    raise UnknownNameError(
        f"There is no {kind} `{name}`"
        + (f"; did you mean `{nearest}`?" if nearest else ".")
        + f" Known: {', '.join(sorted(table))}.",
        name=name,
        known=sorted(table),
        nearest=nearest,
    )


def split_parameters(
    fn: Callable[..., Any], inputs: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the inputs that the function takes, the settings that it reads), by its signature.

    Raises:
        InputError: a setting without a default, or `*args`/`**kwargs`, which hide what is read.
    """
    taken, settings = [], []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(
                f"`{fn.__name__}` takes `{parameter}`; name the inputs and settings it reads. "
                f"Inputs are: {', '.join(sorted(inputs))}.",
                function=fn.__name__,
            )
        if name in inputs:
            taken.append(name)
        elif parameter.default is parameter.empty:
            raise InputError(
                f"`{fn.__name__}` takes `{name}`, which is neither an input "
                f"({', '.join(sorted(inputs))}) nor a setting with a default.",
                function=fn.__name__,
            )
        else:
            settings.append(name)
    return tuple(taken), tuple(settings)


def choose_settings(
    given: Mapping[str, Any], read: Iterable[str], shared: Collection[str], who: str
) -> dict[str, Any]:
    """The given settings that are read. Those that every entry may be given pass in silence.

    Raises:
        UnknownSettingError: a setting that this entry does not read and that is not shared.
    """
    read = tuple(read)
    for name in given:
        if name not in read and name not in shared:
            nearest = next(iter(difflib.get_close_matches(name, read, n=1)), None)
            raise UnknownSettingError(
                f"`{who}` reads no setting `{name}`"
                + (f"; did you mean `{nearest}`?" if nearest else ".")
                + f" It reads: {', '.join(read) or 'none'}.",
                key=name,
                nearest=nearest,
            )
    return {name: value for name, value in given.items() if name in read}


def refuse_second(table: Mapping[str, Any], name: str, origin: str, kind: str) -> None:
    """Raise `InputError` if `name` is taken by another origin; the same file may be read again."""
    if name in table and table[name].origin != origin:
        raise InputError(
            f"The {kind} `{name}` exists already (from {table[name].origin}); give {origin}'s "
            f"another name.",
            name=name,
        )


def origin_of(fn: Callable[..., Any]) -> str:
    """Where a function was written: "built-in", or its file."""
    if fn.__module__.startswith("quadriga.algorithms."):
        return "built-in"
    return inspect.getsourcefile(fn) or fn.__module__
