"""Who wrote a field that is here now: remembered beside the value, for `describe`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from quadriga.protocol.reference import Origin

_known: dict[int, tuple[weakref.ref[Any], tuple[Origin, ...]]] = {}


def mark(value: Any, origins: Iterable[Origin]) -> None:
    """Remembers the makers of a tensor or an array for as long as it lives."""
    found = tuple(dict.fromkeys(origins))
    if not found:
        return
    at = id(value)

    def forget(reference: weakref.ref[Any]) -> None:
        if at in _known and _known[at][0] is reference:
            del _known[at]

    _known[at] = (weakref.ref(value, forget), found)


def origins_of(value: Any) -> tuple[Origin, ...]:
    """The makers of a value; empty when nobody noted them."""
    entry = _known.get(id(value))
    return entry[1] if entry is not None and entry[0]() is value else ()


def inherit(value: Any, sources: Iterable[Any]) -> Any:
    """`value`, marked with the makers of all the values it was taken from."""
    if _known:
        mark(value, (origin for source in sources for origin in origins_of(source)))
    return value
