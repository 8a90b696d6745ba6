"""The store of the local backend: values stay in this process, held by their handles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quadriga.protocol.reference import Handle, HereHandle


class LocalStore:
    """Keeps each value in its handle; the value goes when the last handle does."""

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return HereHandle.hold(value, nbytes)

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return [handle.fetch() for handle in handles]
