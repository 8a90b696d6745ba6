"""Plain data is pickled by Python alone, in less than half the time: Ray looks at every object for
references, and for code that has to be sent along."""

from __future__ import annotations

import sys
from typing import Any

_ATOMS = (int, float, bool, type(None))
_SHORT = 1000


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a short string, or a batch of small fields."""
    if type(value) in _ATOMS:
        return True
    if type(value) is str:
        return len(value) < _SHORT
    return is_plain_batch(value)


def is_plain_batch(value: Any) -> bool:
    """Whether a value is a batch of small fields, as it travels."""
    # Without that module in this process no value can be one.
    module = sys.modules.get("quadriga.protocol.message")
    return module is not None and type(value) is module.Message and value.is_plain
