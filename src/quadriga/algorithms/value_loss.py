"""The critic's loss. Shapes: B samples, T tokens."""

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
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.partial import Partial
from quadriga.errors import AlgorithmError


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    cliprange_value: float | None = 0.5,
    validate: bool = True,
) -> PolicyLoss:
    """Clipped squared error (PPO's reference code; arXiv 1707.06347 has it without the clip).

    ℓ = ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²);  ε = None: ½·(V − R)².

    Args:
        values_BT: predictions now, with gradient. old_values_BT: those of the rollout.
        returns_BT: targets. response_mask_BT: 0/1.

    Returns:
        Loss of each token, 0 outside the mask; metrics `vpred_mean`, `vf_clipfrac` as
        partial sums.

    Raises:
        ShapeError, MaskError, NonFiniteError; AlgorithmError: a negative clip range.
    """
    if cliprange_value is not None and cliprange_value < 0:
        raise AlgorithmError(f"`cliprange_value` must be at least 0, but is {cliprange_value}.")
    require_matrix("response_mask", response_mask_BT)
    tensors = {"values": values_BT, "old_values": old_values_BT, "returns": returns_BT}
    require_same_shape("response_mask", response_mask_BT, **tensors)
    mask = to_bool_mask(response_mask_BT)
    if validate:
        require_finite(mask, **tensors)
    values, old, returns = (as_float(t).masked_fill(~mask, 0) for t in tensors.values())
    loss = plain = (values - returns).square()
    metrics = {"vpred_mean": Partial.mean(values, mask)}
    if cliprange_value is not None:
        near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
        clipped = (near - returns).square()
        loss = torch.maximum(plain, clipped)
        metrics["vf_clipfrac"] = Partial.mean((clipped > plain).float(), mask)
    return PolicyLoss(0.5 * loss, metrics)
