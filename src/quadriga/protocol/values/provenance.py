"""Who wrote a field that is here now: remembered beside the value, for `describe`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from quadriga.protocol.values.storage import Origin

_known: dict[int, tuple[weakref.ref[Any], tuple[Origin, ...]]] = {}


class _Reference(weakref.ref[Any]):
    """Knows under which number its value was noted."""

    __slots__ = ("at",)
    at: int


def _forget(reference: Any) -> None:
    at: int = reference.at
    entry = _known.get(at)
    if entry is not None and entry[0] is reference:
        del _known[at]


def mark(value: Any, origins: Sequence[Origin]) -> None:
    """Remembers the makers of a tensor or an array for as long as it lives."""
    if not origins:
        return
    at = id(value)
    reference: Any = _Reference(value, _forget)
    reference.at = at
    found = (origins[0],) if len(origins) == 1 else tuple(dict.fromkeys(origins))
    _known[at] = (reference, found)


def origins_of(value: Any) -> tuple[Origin, ...]:
    """The makers of a value; empty when nobody noted them."""
    entry = _known.get(id(value))
    return entry[1] if entry is not None and entry[0]() is value else ()


def inherit(value: Any, sources: Iterable[Any]) -> Any:
    """`value`, marked with the makers of all the values it was taken from."""
    if _known:
        mark(value, [origin for source in sources for origin in origins_of(source)])
    return value
