"""When `protocol.shipping` is needed for a value that crosses between controller and worker.

Loading it loads tensordict, which takes as long as loading torch. A process that moves no tensors
never does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

SHIPPING = "quadriga.protocol.boundary"
_ATOMS = (str, bytes, int, float, bool, complex, type(None))
_DATA_HOMES = ("torch.", "tensordict.", "numpy.", "quadriga.protocol.")
_LONG = 64


def shipping_for(values: Iterable[Any]) -> ModuleType | None:
    """`protocol.shipping` if it is loaded or one of `values` needs it, else None."""
    loaded = sys.modules.get(SHIPPING)
    if loaded is not None:
        return loaded
    # Without torch in this process no value can hold a tensor.
    if "torch" not in sys.modules or not any(map(_holds_data, values)):
        return None
    from quadriga.protocol import boundary as shipping

    return shipping


def private_copy(value: Any) -> Any:
    """Containers and arrays of plain data, copied where somebody else could see a change: what
    `protocol.shipping` does, for processes that have not loaded it."""
    kind = type(value)
    if kind is dict:
        return {key: private_copy(item) for key, item in value.items()}
    if kind in (list, tuple, set):
        return kind(private_copy(item) for item in value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.copy()
    return value


def _holds_data(value: Any) -> bool:
    kind = type(value)
    if kind in _ATOMS:
        return False
    if kind is dict:
        return any(map(_holds_data, value.values()))
    if kind in (list, tuple, set):
        # Long sequences that begin with an atom are taken to hold nothing else.
        if len(value) > _LONG and type(next(iter(value))) in _ATOMS:
            return False
        return any(map(_holds_data, value))
    return any(f"{base.__module__}.".startswith(_DATA_HOMES) for base in kind.__mro__)
