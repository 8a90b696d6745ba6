"""Reward shaping, and zero-variance prompt groups. Shapes: B samples, T tokens, G prompt groups.

A prompt group is zero-variance if all its samples have the same score ("dead" in the names of
metrics). Group-relative estimators give it advantage 0. All functions are pure: they return new
tensors and do not change their inputs.
"""

import torch
from torch import Tensor

from quadriga.algorithms import tensors
from quadriga.errors import AlgorithmError, GroupError


def overlong_penalty(
    lengths_B: Tensor, *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Tensor:
    """Compute the soft over-long penalty of each response (DAPO, arXiv 2503.14476, eq. 13).

    The penalty is 0 up to max_length − buffer_length tokens, then falls linearly to
    −penalty_factor at max_length, and stays there for longer responses.

    Args:
        lengths_B: lengths in tokens.
        max_length, buffer_length: in tokens.
        penalty_factor: the size of the full penalty.

    Returns:
        float32 [B], never above 0.

    Raises:
        AlgorithmError: `buffer_length` is not in 1 … max_length.
    """
    if not 0 < buffer_length <= max_length:
        raise AlgorithmError(
            f"The over-long buffer must be 1 … {max_length} tokens (the maximum response length), "
            f"but received {buffer_length}."
        )
    # max_length 100, buffer_length 20, lengths 80, 85, 100, 120:
    # excess 0, 0.25, 1, 2, clamped to 0, 0.25, 1, 1.
    excess = (lengths_B - (max_length - buffer_length)).float() / buffer_length
    return -penalty_factor * excess.clamp(0, 1)


def add_to_last_token(rewards_BT: Tensor, response_mask_BT: Tensor, amounts_B: Tensor) -> Tensor:
    """Return the rewards with `amounts_B` added at each sample's last generated token.

    A sample without generated tokens is not changed.

    Raises:
        ShapeError, MaskError.
        NonFiniteError: an amount is NaN or infinite.
    """
    mask = tensors.checked_mask(response_mask_BT, False, rewards=rewards_BT)
    tensors.require_same_shape("samples", mask.new_empty(len(mask)), amounts=amounts_B)
    tensors.require_finite(amounts=amounts_B)
    steps = torch.arange(mask.shape[1], device=mask.device)
    if mask.shape[1] == 0:
        return tensors.as_float(rewards_BT).clone()
    # mask 1 0 1 0: steps · mask = 0 0 2 0, so the last generated token is at position 2. An empty
    # row also gives position 0, where its amount is set to 0.
    last = (steps * mask).amax(-1, keepdim=True)
    amounts = (amounts_B * mask.any(-1)).to(tensors.as_float(rewards_BT).dtype)[:, None]
    return tensors.as_float(rewards_BT).scatter_add(1, last, amounts)


def drop_truncated(response_mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """Return the mask with 0 on truncated samples.

    This is the over-long filtering of DAPO (arXiv 2503.14476). A truncated sample reached the
    length limit. It then has no loss and is not a member of its
    prompt group.

    Args:
        truncated_B: 0/1 or bool.

    Returns:
        bool [B, T].

    Raises:
        ShapeError, MaskError.
    """
    mask = tensors.checked_mask(response_mask_BT)
    tensors.require_same_shape("samples", mask.new_empty(len(mask)), truncated=truncated_B)
    return mask & ~tensors.to_bool_mask(truncated_B, "truncated")[:, None]


def shape_rewards(
    rewards_BT: Tensor, response_mask_BT: Tensor, *, clip: float | None = None, whiten: bool = False
) -> Tensor:
    """Clip the rewards, then whiten them, each only if requested.

    Args:
        clip: the rewards are clamped to ±clip; None does not clip.
        whiten: whether to scale to unit variance over the generated tokens; the mean stays.

    Returns:
        float32 or float64, 0 outside the mask.

    Raises:
        ShapeError, MaskError, NonFiniteError.
        AlgorithmError: `clip` is not above 0.
    """
    mask = tensors.checked_mask(response_mask_BT, token_level_rewards=rewards_BT)
    rewards = tensors.as_float(rewards_BT).masked_fill(~mask, 0)
    if clip is not None:
        if not clip > 0:
            raise AlgorithmError(f"`reward_clip` must be above 0, but received {clip}.")
        rewards = rewards.clamp(-clip, clip)
    return tensors.masked_whiten(rewards, mask, shift_mean=False) if whiten else rewards


def groups_of_scores(scores_B: Tensor, group_ids: tensors.GroupIds) -> tensors.Groups:
    """Return the prompt groups, with every sample as a member.

    Raises:
        GroupError: there are no samples, `scores_B` is not 1-d, or an id is None or NaN.
        ShapeError, NonFiniteError.
    """
    if scores_B.dim() != 1 or scores_B.numel() == 0:
        raise GroupError(
            f"`scores` must hold one number per sample, at least one, but has shape "
            f"{list(scores_B.shape)}.",
            tensor="scores",
        )
    tensors.require_finite(scores=scores_B)
    return tensors.make_groups(group_ids, torch.ones_like(scores_B, dtype=torch.bool))


def nonzero_variance_rows(scores_B: Tensor, group_ids: tensors.GroupIds) -> Tensor:
    """Return bool [B], False for samples of zero-variance prompt groups.

    Raises:
        ShapeError, NonFiniteError, GroupError.
    """
    groups = groups_of_scores(scores_B, group_ids)
    return groups.nonzero_variance_G(scores_B)[groups.index_B]


def zero_variance_metrics(scores_B: Tensor, group_ids: tensors.GroupIds) -> dict[str, float]:
    """Count the zero-variance prompt groups.

    Returns:
        `total`: the number of prompt groups.
        `dead`: the number of zero-variance prompt groups.
        `dead_fraction`: the same as a fraction of all prompt groups.
        `dead_at_top`: zero-variance prompt groups at the largest score of the batch (too easy), as
            a fraction of all prompt groups.
        `dead_at_bottom`: the same at its smallest score (too hard).
        `std_mean`: the mean over prompt groups of the standard deviation within the prompt group.

    Raises:
        ShapeError, NonFiniteError, GroupError.
    """
    groups = groups_of_scores(scores_B, group_ids)
    zero_variance = ~groups.nonzero_variance_G(scores_B)
    # All scores of a zero-variance prompt group are equal, so its maximum is its level.
    level = groups.extreme_G(scores_B, largest=True)
    top, bottom = (zero_variance & (level == edge) for edge in (scores_B.max(), scores_B.min()))
    return {
        "total": float(groups.num_groups),
        "dead": float(zero_variance.sum()),
        "dead_fraction": float(zero_variance.double().mean()),
        "dead_at_top": float(top.double().mean()),
        "dead_at_bottom": float(bottom.double().mean()),
        "std_mean": float(groups.std_G(scores_B).mean()),
    }
