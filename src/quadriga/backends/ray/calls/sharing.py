"""An argument that several ranks receive is put into Ray's store once, if it is big."""

from __future__ import annotations

import sys
from typing import Any

import ray

from quadriga.single_controller.call import SharedArgument

BIG = 100 * 1024
"""Bytes. Below this Ray carries an argument inside the call, above it stores one copy per call."""
LOOK_AT = 64
"""How many items of a container are looked at."""


class RayShared(SharedArgument):
    """A value in Ray's store."""

    __slots__ = ("ref",)

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def open(self) -> Any:
        return ray.get(self.ref)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayShared, (self.ref,)


def share(packed: Any, value: Any) -> Any:
    """What is packed, or a stand-in for it if `value`, from which it was made, is bigger than what
    a call carries well. Batches are small here: their fields are in the store already."""
    return RayShared(ray.put(packed)) if estimate(value) > BIG else packed


def estimate(value: Any, depth: int = 3) -> int:
    """Bytes of a value, roughly and quickly: strings, arrays, and containers of them."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if depth == 0 or not isinstance(value, list | tuple | dict | set):
        return sys.getsizeof(value, 0)
    items = list(value.values()) if isinstance(value, dict) else list(value)
    if not items:
        return 0
    seen = items[:LOOK_AT]
    return sum(estimate(item, depth - 1) for item in seen) * len(items) // len(seen)
