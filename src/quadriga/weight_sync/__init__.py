"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

- `planning`: the plan of who sends what to whom, generation groups without redundancy.
- `channels`, `transport`: execute a plan between processes.
- `sources`, `digests`: read the training engine. `verification`, `probe`: compare it with the
  rollout engine.
- `sync`: to a rollout engine in the same process.
- `buckets`: to rollout engines in other processes, in batches of bounded size.
- `adapters`: for a rollout engine that holds adapters, only these are sent.
- `joined`: the same over a process group that joins the ranks of both.
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
    "compare_digests": "digests",
    "needs_of": "sync",
}

__all__ = list(_HOME)

if TYPE_CHECKING:
    from quadriga.weight_sync.buckets import WeightReceiver as WeightReceiver
    from quadriga.weight_sync.buckets import WeightSender as WeightSender
    from quadriga.weight_sync.digests import compare_digests as compare_digests
    from quadriga.weight_sync.sync import SyncReport as SyncReport
    from quadriga.weight_sync.sync import WeightNeeds as WeightNeeds
    from quadriga.weight_sync.sync import WeightSync as WeightSync
    from quadriga.weight_sync.sync import needs_of as needs_of
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
