"""The store of the Ray backend: values lie in Ray's object store, counted by Ray's references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from quadriga.errors import LostObjectError
from quadriga.protocol.reference import Handle

_LOST = (
    ray.exceptions.ObjectLostError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.ObjectFreedError,
    ray.exceptions.ReferenceCountingAssertionError,
    ray.exceptions.ObjectFetchTimedOutError,
)


@dataclass(frozen=True, slots=True)
class RayHandle:
    """One object in Ray's store. Pickling it passes a Ray reference on."""

    ref: Any
    nbytes: int

    @property
    def key(self) -> str:
        return str(self.ref.hex())

    def fetch(self) -> Any:
        return fetch_all([self])[0]


def fetch_all(handles: Sequence[RayHandle]) -> list[Any]:
    """One `ray.get` for all handles. Raises `LostObjectError` when an owner has died."""
    try:
        values: list[Any] = ray.get([handle.ref for handle in handles])
    except _LOST as error:
        raise LostObjectError(f"an object in Ray's store is gone: {error}") from error
    return values


class RayStore:
    """Puts values into Ray's object store; this process becomes their owner."""

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return RayHandle(ray.put(value), nbytes)

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return fetch_all(handles)  # type: ignore[arg-type]
