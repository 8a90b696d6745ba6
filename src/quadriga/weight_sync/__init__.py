"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

- `sync`: to a rollout engine in the same process.
- `buckets`: to rollout engines in other processes, in batches of bounded size.

May import every package below `weight_sync` in docs/architecture.md. Names load
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "SyncReport": "sync",
    "compare_digests": "sync",
    "sync_weights": "sync",
    "WeightReceiver": "buckets",
    "weight_buckets": "buckets",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.weight_sync.buckets import WeightReceiver as WeightReceiver
    from quadriga.weight_sync.buckets import weight_buckets as weight_buckets
    from quadriga.weight_sync.sync import SyncReport as SyncReport
    from quadriga.weight_sync.sync import compare_digests as compare_digests
    from quadriga.weight_sync.sync import sync_weights as sync_weights
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
