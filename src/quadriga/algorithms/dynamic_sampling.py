"""Groups without signal: found, counted, masked or replaced (DAPO, arXiv 2503.14476, section 3.2).

A group whose samples all have the same reward gives no advantage. It costs a rollout, an update
of nothing, and makes the batch smaller than it looks. Shapes: B samples, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.checks import require_finite
from quadriga.algorithms.groups import Groups, make_groups
from quadriga.algorithms.registry import look_up
from quadriga.errors import AlgorithmError, GroupError

GroupIds = Sequence[Any] | np.ndarray | Tensor

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
        metrics: `group_metrics` of all samples, and `filter/kept_groups`, `filter/gen_batches`.
    """

    action: Literal["train", "refill"]
    rows: Tensor
    alive: Tensor
    missing_groups: int
    metrics: dict[str, float]


def group_metrics(scores_B: Tensor, group_ids: GroupIds) -> dict[str, float]:
    """How many groups teach something.

    Keys: `groups/total`, `groups/dead` (all rewards equal) and, as shares of all groups,
    `groups/dead_fraction`, `groups/dead_at_top` and `groups/dead_at_bottom` (dead at the batch's
    largest or smallest reward: too easy, too hard), `groups/std_mean` the mean spread in a group.

    Raises:
        ShapeError, NonFiniteError, GroupError.
    """
    return _metrics(scores_B, _groups(scores_B, group_ids))


def _groups(scores_B: Tensor, group_ids: GroupIds) -> Groups:
    if scores_B.numel() == 0:
        raise GroupError("There are no samples to group.", tensor="scores")
    require_finite(scores=scores_B)
    return make_groups(group_ids, torch.ones_like(scores_B, dtype=torch.bool))


def _metrics(scores_B: Tensor, groups: Groups) -> dict[str, float]:
    dead = ~groups.signal_G(scores_B)
    level = groups.extreme_G(scores_B, largest=True)
    top, bottom = (dead & (level == edge) for edge in (scores_B.max(), scores_B.min()))
    return {
        "groups/total": float(groups.num_groups),
        "groups/dead": float(dead.sum()),
        "groups/dead_fraction": float(dead.double().mean()),
        "groups/dead_at_top": float(top.double().mean()),
        "groups/dead_at_bottom": float(bottom.double().mean()),
        "groups/std_mean": float(groups.std_G(scores_B).mean()),
    }


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
    groups = _groups(scores_B, group_ids)
    signal = groups.signal_G(scores_B)
    living = int(signal.sum())
    metrics = {**_metrics(scores_B, groups), "filter/gen_batches": float(gen_batches)}
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
    return SamplingDecision(action, rows, alive, missing, {**metrics, "filter/kept_groups": kept})
