"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

- `plan`: which rank sends which part of which weight to whom, from two layouts.
- `transport`: read the training engine, and execute a plan between processes.
- `sync`: compare the rollout engine with the training engine; the sync in one process.
- `remote`: to rollout engines in other processes, over a process group that joins both groups, or
  in batches of bounded size, of which a receiver may be lost.
- `worker`: the methods of the policy's worker that the controller calls.

May import every package below `weight_sync` in docs/architecture.md.
"""
