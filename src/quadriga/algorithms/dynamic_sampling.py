"""Groups without signal: found, counted, masked or replaced (DAPO, arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward gives no advantage. It costs a rollout, an update
of nothing, and makes the batch smaller than it looks. Shapes: B samples, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadriga.algorithms.groups import GroupIds, Groups
from quadriga.algorithms.registry import look_up
from quadriga.algorithms.shaping import dead_group_metrics, groups_of_scores
from quadriga.errors import AlgorithmError, GroupError

MODES = {
    "mask": "groups without signal stay in the batch with weight zero",
    "refill": "they are dropped, and more prompts are drawn, up to a bound",
}
UNDER_FILLED = {
    "proceed": "train on the groups there are; the batch is filled up with groups of weight zero",
    "error": "stop the run",
}


@dataclass(frozen=True)
class SamplingDecision:
    """What to do with the samples drawn so far.

    Attributes:
        action: "train" on `rows`, or "refill": keep `rows`, draw `missing_groups` more, ask again.
        rows: int64, rows to keep, whole groups, in the order in which they came.
        alive: bool, for each of `rows`: False means weight zero (mask all its tokens).
        missing_groups: groups with signal that are wanted and not there.
        metrics: `dead_group_metrics` of all samples, and `kept` groups, `gen_batches`.
    """

    action: Literal["train", "refill"]
    rows: Tensor
    alive: Tensor
    missing_groups: int
    metrics: dict[str, float]


def dynamic_sampling(
    scores_B: Tensor,
    group_ids: GroupIds,
    *,
    wanted_groups: int,
    mode: str = "mask",
    gen_batches: int = 1,
    max_num_gen_batches: int = 3,
    under_filled: str = "proceed",
) -> SamplingDecision:
    """Decide over all samples drawn so far for one step.

    Args:
        scores_B: each sample's reward. group_ids: its prompt; samples of a group may lie anywhere.
        wanted_groups: groups of a full batch.
        mode: a key of `MODES`. gen_batches: batches drawn so far for this step.
        max_num_gen_batches: draw no more than so many. under_filled: a key of `UNDER_FILLED`,
            for when the bound is reached.

    Raises:
        GroupError: no samples; under-filled, and the policy is `error`.
        UnknownNameError: mode or policy. AlgorithmError: a bound below 1.
        ShapeError, NonFiniteError.
    """
    look_up(MODES, mode, "dynamic sampling mode")
    look_up(UNDER_FILLED, under_filled, "policy for under-filled batches")
    if wanted_groups < 1 or max_num_gen_batches < 1:
        raise AlgorithmError(
            f"`wanted_groups` and `max_num_gen_batches` must be at least 1, but are "
            f"{wanted_groups} and {max_num_gen_batches}."
        )
    groups = groups_of_scores(scores_B, group_ids)
    signal = groups.signal_G(scores_B)
    living = int(signal.sum())
    metrics = {**dead_group_metrics(scores_B, group_ids), "gen_batches": float(gen_batches)}
    missing = max(wanted_groups - living, 0)
    if mode == "mask":
        return _keep(groups, torch.ones_like(signal), signal, "train", missing, metrics)
    if missing and gen_batches < max_num_gen_batches:
        return _keep(groups, signal, signal, "refill", missing, metrics)
    if missing and under_filled == "error":
        raise GroupError(
            f"{living} of {groups.num_groups} groups have signal after {gen_batches} batches of "
            f"rollouts, {missing} fewer than the {wanted_groups} wanted. Make the prompts neither "
            f"too easy nor too hard, allow more batches (max_num_gen_batches is "
            f"{max_num_gen_batches}), or set under_filled=proceed.",
            tensor="scores",
            wanted=wanted_groups,
            got=living,
        )
    return _keep(groups, _fill(signal, wanted_groups), signal, "train", missing, metrics)


def _fill(signal_G: Tensor, wanted: int) -> Tensor:
    """bool [G]: the first `wanted` groups, those with signal before those without."""
    order = torch.argsort(~signal_G, stable=True)[:wanted]
    chosen = torch.zeros_like(signal_G)
    chosen[order] = True
    return chosen


def _keep(
    groups: Groups,
    chosen_G: Tensor,
    signal_G: Tensor,
    action: Literal["train", "refill"],
    missing: int,
    metrics: dict[str, float],
) -> SamplingDecision:
    rows = chosen_G[groups.index_B].nonzero()[:, 0]
    alive = signal_G[groups.index_B][rows]
    kept = float((chosen_G & signal_G).sum())
    return SamplingDecision(action, rows, alive, missing, {**metrics, "kept": kept})
