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

if TYPE_CHECKING:
    from quadriga.weight_sync.buckets import (
        WeightReceiver as WeightReceiver,
        WeightSender as WeightSender,
    )
    from quadriga.weight_sync.sync import (
        SyncReport as SyncReport,
        WeightNeeds as WeightNeeds,
        WeightSync as WeightSync,
        needs_of as needs_of,
    )
    from quadriga.weight_sync.verification import compare_digests as compare_digests
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
