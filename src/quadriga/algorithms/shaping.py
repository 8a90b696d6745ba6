"""Shaping of rewards and batches before advantages. Shapes: B samples, T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.checks import as_float, require_matrix, require_same_shape, to_bool_mask
from quadriga.algorithms.masked import masked_whiten
from quadriga.errors import AlgorithmError


def informative_groups(score_B: Tensor, group_ids: Sequence[Any] | np.ndarray) -> Tensor:
    """True where a sample's group holds more than one score (DAPO, arXiv 2503.14476, section 3.2).

    A group whose scores are all equal has advantage 0 everywhere and teaches nothing.
    Returns bool [B].
    """
    _, place = np.unique(np.asarray(group_ids, dtype=object).astype(str), return_inverse=True)
    index = torch.from_numpy(place.reshape(-1))
    count = int(index.max()) + 1 if len(index) else 0
    score = as_float(score_B)
    highest = score.new_full((count,), -torch.inf).scatter_reduce(0, index, score, "amax")
    lowest = score.new_full((count,), torch.inf).scatter_reduce(0, index, score, "amin")
    return (highest > lowest)[index]


def dead_group_metrics(
    score_B: Tensor, group_ids: Sequence[Any] | np.ndarray, *, solved: float = 1.0
) -> dict[str, float]:
    """Shares of samples in groups without signal: `dead`; of these, `all_solved` (score at least
    `solved`) and `all_failed` (the rest)."""
    dead = ~informative_groups(score_B, group_ids)
    good = dead & (score_B >= solved)
    size = max(1, len(dead))
    return {
        "dead": float(dead.sum()) / size,
        "all_solved": float(good.sum()) / size,
        "all_failed": float((dead & ~good).sum()) / size,
    }


def overlong_penalty(
    length_B: Tensor, *, max_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> Tensor:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, eq. 13), float32 [B], 0 or below.

    With L = max_length, b = buffer_length, f = penalty_factor: 0 up to L − b tokens, then falling
    linearly to −f at L.

    Raises:
        AlgorithmError: the buffer is not between 1 and `max_length`.
    """
    if not 1 <= buffer_length <= max_length:
        raise AlgorithmError(
            f"`buffer_length` must be between 1 and max_length={max_length}, but is "
            f"{buffer_length}."
        )
    excess = length_B.float() - (max_length - buffer_length)
    return -(excess / buffer_length).clamp(0, 1) * penalty_factor


def shape_rewards(
    scores_BT: Tensor, response_mask_BT: Tensor, *, clip: float | None = None, whiten: bool = False
) -> Tensor:
    """Scores clipped to ±`clip`, then whitened over the batch's tokens; 0 outside the mask.

    Raises:
        ShapeError, MaskError; AlgorithmError: `clip` is not above 0.
    """
    if clip is not None and clip <= 0:
        raise AlgorithmError(f"`reward_clip` must be above 0, but is {clip}.")
    require_matrix("response_mask", response_mask_BT)
    require_same_shape("response_mask", response_mask_BT, token_level_scores=scores_BT)
    mask = to_bool_mask(response_mask_BT)
    scores = as_float(scores_BT).masked_fill(~mask, 0)
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    return masked_whiten(scores, mask, shift_mean=False) if whiten else scores
