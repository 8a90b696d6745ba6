"""The store of the Ray backend: values lie in Ray's object store, counted by Ray's references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from quadriga.errors import LostObjectError
from quadriga.protocol.reference import Handle, fetch_many

_LOST = (
    ray.exceptions.ObjectLostError,
    ray.exceptions.ReferenceCountingAssertionError,
    ray.exceptions.ObjectFetchTimedOutError,
)


class RayHandle:
    """One object in Ray's store. Pickled inside a call, a reply or another object, it passes a Ray
    reference on; the object is released when the last process drops the last one."""

    __slots__ = ("nbytes", "ref")

    def __init__(self, ref: Any, nbytes: int) -> None:
        self.ref = ref
        self.nbytes = nbytes

    @property
    def key(self) -> str:
        return str(self.ref.hex())

    def fetch(self) -> Any:
        return self.fetch_many([self])[0]

    @staticmethod
    def fetch_many(handles: Sequence[Any]) -> list[Any]:
        """Views of shared memory, one `ray.get` for all. Raises `LostObjectError` when one is gone:
        its owner, the process that put it, has died."""
        try:
            values: list[Any] = ray.get([handle.ref for handle in handles])
        except _LOST as error:
            raise LostObjectError(f"an object in Ray's store is gone: {error}") from error
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self.ref, self.nbytes)


class RayStore:
    """Puts values into Ray's object store; this process owns what it puts."""

    in_process = False

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return RayHandle(ray.put(value), nbytes)

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return fetch_many(handles)
