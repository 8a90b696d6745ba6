"""Plain types, and the one walk over nested containers. Imports neither torch nor numpy."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

PLAIN_TYPES: tuple[type, ...] = (str, bytes, int, float, bool, complex, type(None))
"""Types whose values contain no other value and cannot change."""
_PLAIN = frozenset(PLAIN_TYPES)
_SEQUENCES = (list, tuple, set, frozenset)


def walk(value: Any, leaf: Callable[[Any], object]) -> Any:
    """Rebuild nested containers with `leaf` applied to every value that is not a container.

    Containers are lists, tuples, named tuples, sets and dicts of these exact types, and
    `OrderedDict` and `defaultdict`. Values of plain types are kept without a call of `leaf`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict or kind is OrderedDict:
        return kind((k, walk(v, leaf)) for k, v in value.items())
    if kind in _SEQUENCES:
        if _is_plain_sequence(value):
            return kind(value)
        return kind(walk(v, leaf) for v in value)
    if kind is defaultdict:
        return kind(value.default_factory, {k: walk(v, leaf) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(walk(v, leaf) for v in value))
    return leaf(value)


def _is_plain_sequence(value: Iterable[object]) -> bool:
    """Return whether all items are plain. A set of types is built in C, 10 ns an item."""
    return _PLAIN.issuperset(map(type, value))
