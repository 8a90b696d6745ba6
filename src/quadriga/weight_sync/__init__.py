"""From the training layout to the rollout's, with proof that all of it arrived."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.weight_sync.sync import SyncReport as SyncReport
    from quadriga.weight_sync.sync import compare_digests as compare_digests
    from quadriga.weight_sync.sync import sync_weights as sync_weights

__all__ = ["SyncReport", "compare_digests", "sync_weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.sync"), name)
