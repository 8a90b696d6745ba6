"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

- `plan`: which rank sends which part of which weight to whom, from two layouts.
- `transport`: read the training engine, and execute a plan between processes.
- `remote`: to rollout engines in other processes, over a process group that joins both groups, or
  in batches of bounded size, of which a receiver may be lost.
- `sync`: to the rollout engine in the same process; the methods of the policy's worker that the
  controller calls.

The rollout engine's guard compares it with the training engine (`rollout.guard`).

May import every package below `weight_sync` in docs/architecture.md.
"""
