"""What happens to rewards before they become advantages. Shapes: B samples, T tokens.

Over-long penalty and filter, clipping and whitening, and which groups have a signal at all. All
pure: new tensors, inputs untouched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.groups import GroupIds, Groups, make_groups
from quadriga.algorithms.masked import masked_whiten
from quadriga.errors import AlgorithmError, GroupError


def overlong_penalty(
    lengths_B: Tensor, *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Tensor:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, eq. 13), float32 [B], never above 0.

    0 up to max_length − buffer_length, then falling in a line to −penalty_factor at max_length,
    and staying there beyond.

    Raises:
        AlgorithmError: a buffer that is not in 1 … max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise AlgorithmError(
            f"The over-long buffer must be 1 … {max_length} tokens (the longest response), but is "
            f"{buffer_length}."
        )
    excess = (lengths_B - (max_length - buffer_length)).float() / buffer_length
    return -penalty_factor * excess.clamp(0, 1)


def add_to_last_token(rewards_BT: Tensor, response_mask_BT: Tensor, amounts_B: Tensor) -> Tensor:
    """rewards_BT with amounts_B added at each sample's last own token.

    A sample without tokens gets nothing.

    Raises:
        ShapeError, MaskError; NonFiniteError: an amount that is NaN or infinite.
    """
    require_matrix("response_mask", response_mask_BT)
    require_same_shape("response_mask", response_mask_BT, rewards=rewards_BT)
    require_same_shape(
        "samples", response_mask_BT.new_empty(len(response_mask_BT)), amounts=amounts_B
    )
    require_finite(amounts=amounts_B)
    mask = to_bool_mask(response_mask_BT)
    steps = torch.arange(mask.shape[1], device=mask.device)
    if mask.shape[1] == 0:
        return as_float(rewards_BT).clone()
    last = (steps * mask).amax(-1, keepdim=True)
    amounts = (amounts_B * mask.any(-1)).to(as_float(rewards_BT).dtype)[:, None]
    return as_float(rewards_BT).scatter_add(1, last, amounts)


def drop_truncated(response_mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """The mask with the samples that ran into the length limit taken out (over-long filtering,
    DAPO, arXiv 2503.14476): bool [B, T].

    Such a sample then neither trains nor counts in its group.

    Raises:
        ShapeError, MaskError.
    """
    require_matrix("response_mask", response_mask_BT)
    require_same_shape(
        "samples", response_mask_BT.new_empty(len(response_mask_BT)), truncated=truncated_B
    )
    return to_bool_mask(response_mask_BT) & ~to_bool_mask(truncated_B, "truncated")[:, None]


def clip_rewards(rewards_BT: Tensor, *, limit: float) -> Tensor:
    """Rewards held within ±limit. Raises `AlgorithmError` for a limit that is not above 0."""
    if not limit > 0:
        raise AlgorithmError(f"`reward_clip` must be above 0, but is {limit}.")
    return rewards_BT.clamp(-limit, limit)


def whiten_rewards(rewards_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Token-level rewards at unit variance over the batch's own tokens, their mean kept.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    require_matrix("response_mask", response_mask_BT)
    require_same_shape("response_mask", response_mask_BT, token_level_rewards=rewards_BT)
    mask = to_bool_mask(response_mask_BT)
    require_finite(mask, token_level_rewards=rewards_BT)
    return masked_whiten(rewards_BT, mask, shift_mean=False)


def shape_rewards(
    rewards_BT: Tensor, response_mask_BT: Tensor, *, clip: float | None = None, whiten: bool = False
) -> Tensor:
    """Clip, then whiten, each if asked for; at least float32, 0 outside the mask.

    Raises:
        ShapeError, MaskError, NonFiniteError; AlgorithmError: a clip that is not above 0.
    """
    require_matrix("response_mask", response_mask_BT)
    require_same_shape("response_mask", response_mask_BT, token_level_rewards=rewards_BT)
    mask = to_bool_mask(response_mask_BT)
    rewards = as_float(rewards_BT).masked_fill(~mask, 0)
    require_finite(token_level_rewards=rewards)
    if clip is not None:
        rewards = clip_rewards(rewards, limit=clip)
    return masked_whiten(rewards, mask, shift_mean=False) if whiten else rewards


def groups_of_scores(scores_B: Tensor, group_ids: GroupIds) -> Groups:
    """Groups in which every sample counts. Raises `GroupError` for no samples, and as
    `make_groups`; `NonFiniteError`."""
    if scores_B.dim() != 1 or scores_B.numel() == 0:
        raise GroupError(
            f"`scores` must hold one number a sample, at least one, but has shape "
            f"{list(scores_B.shape)}.",
            tensor="scores",
        )
    require_finite(scores=scores_B)
    return make_groups(group_ids, torch.ones_like(scores_B, dtype=torch.bool))


def informative_groups(scores_B: Tensor, group_ids: GroupIds) -> Tensor:
    """bool [B]: True for samples of groups whose rewards are not all equal.

    Raises:
        ShapeError, NonFiniteError, GroupError.
    """
    groups = groups_of_scores(scores_B, group_ids)
    return groups.signal_G(scores_B)[groups.index_B]


def dead_group_metrics(scores_B: Tensor, group_ids: GroupIds) -> dict[str, float]:
    """How many groups teach something.

    Keys: `total` and `dead` groups (all rewards equal), and as shares of all groups
    `dead_fraction`, `dead_at_top` and `dead_at_bottom` (dead at the batch's largest or smallest
    reward: too easy, too hard); `std_mean`, the mean spread within a group.

    Raises:
        ShapeError, NonFiniteError, GroupError.
    """
    groups = groups_of_scores(scores_B, group_ids)
    dead = ~groups.signal_G(scores_B)
    level = groups.extreme_G(scores_B, largest=True)
    top, bottom = (dead & (level == edge) for edge in (scores_B.max(), scores_B.min()))
    return {
        "total": float(groups.num_groups),
        "dead": float(dead.sum()),
        "dead_fraction": float(dead.double().mean()),
        "dead_at_top": float(top.double().mean()),
        "dead_at_bottom": float(bottom.double().mean()),
        "std_mean": float(groups.std_G(scores_B).mean()),
    }
