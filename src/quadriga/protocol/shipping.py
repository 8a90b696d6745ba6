"""The four crossings between the controller and its workers.

    controller --pack_argument--> | wire | --unpack_argument--> worker method
    controller <--unpack_result-- | wire | <--pack_result------ worker method

Containers (list, tuple, dict) are walked; anything that holds no batch and no tensor passes as it
is.
"""

from __future__ import annotations

from typing import Any

from quadriga.protocol.future import DataProtoFuture
from quadriga.protocol.reference import Origin, current_store, use_store

__all__ = [
    "Origin",
    "current_store",
    "pack_argument",
    "pack_result",
    "unpack_argument",
    "unpack_result",
    "use_store",
]


def pack_result(value: Any, origin: Origin) -> Any:
    """In the worker, after the method: what the reply carries."""
    return value


def unpack_result(value: Any) -> Any:
    """On the controller: what the caller sees."""
    return value


def pack_argument(value: Any) -> Any:
    """On the controller: what a call carries."""
    return value


def unpack_argument(value: Any) -> Any:
    """In the worker, before the method: what the method sees. Waits for futures."""
    if isinstance(value, DataProtoFuture):
        return value.get()
    if type(value) in (list, tuple):
        return type(value)(unpack_argument(v) for v in value)
    if type(value) is dict:
        return {k: unpack_argument(v) for k, v in value.items()}
    return value
