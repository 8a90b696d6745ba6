"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

- `plan`: which rank sends which part of which weight to whom, from two layouts.
- `sources`: read the training engine.
- `transport`: execute a plan between processes.
- `verification`: compare the rollout engine with the training engine.
- `sync`: to a rollout engine in the same process.
- `joined`: to rollout engines in other processes, over a process group that joins both groups.
- `buckets`: the same in batches of bounded size, of which a receiver may be lost.
- `worker`: the methods of the policy's worker that the controller calls.

May import every package below `weight_sync` in docs/architecture.md. Names load
when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

_HOME = {
    "SyncReport": "sync",
    "WeightNeeds": "sync",
    "WeightReceiver": "buckets",
    "WeightSender": "buckets",
    "WeightSync": "sync",
    "compare_digests": "verification",
    "needs_of": "sync",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.weight_sync.buckets import WeightReceiver as WeightReceiver
    from quadriga.weight_sync.buckets import WeightSender as WeightSender
    from quadriga.weight_sync.sync import SyncReport as SyncReport
    from quadriga.weight_sync.sync import WeightNeeds as WeightNeeds
    from quadriga.weight_sync.sync import WeightSync as WeightSync
    from quadriga.weight_sync.sync import needs_of as needs_of
    from quadriga.weight_sync.verification import compare_digests as compare_digests
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
