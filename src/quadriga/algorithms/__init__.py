"""The mathematics of RL post-training as pure functions on tensors.

Advantages and rewards, in the order in which a training step uses them:

- `shaping`: over-long penalty, clipping and whitening of rewards; zero-variance prompt groups.
- `dynamic_sampling`: draw more prompts in place of zero-variance prompt groups.
- `advantages`: the estimators from returns (GAE, REINFORCE++, ReMax) and from prompt groups (GRPO,
  RLOO and others), their table, and `compute_advantages`.
- `importance`: weights and metrics for the mismatch between rollout and training engine.

Losses:

- `policy_losses`: the table of policy losses and `compute_policy_loss`. The losses are in
  `clipped_losses` and `covariance_losses`.
- `kl` (with the entropy bonus), `full_kl`: the other terms of the actor's loss.
- `value_loss`: the loss of the critic and of a reward model.
- `aggregation`: from the loss of each token to one number; metrics that can be merged over
  micro-batches and ranks.

Building blocks: `tensors` (validation, masked statistics, prompt groups, discounted sums),
`registry` (lookups in tables), `user_files` (a user's own estimators and losses), `catalog` (all
tables as rows).

A function here takes tensors and keyword settings. It sees no `DataProto`, no configuration
object, no process group and no backend. Modules import the standard library, numpy, torch and
`quadriga.errors`, nothing else of Quadriga. `docs/notation.md` explains the shape suffixes (`_BT`)
and the symbols.
"""
