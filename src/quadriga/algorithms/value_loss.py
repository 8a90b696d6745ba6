"""The loss of the critic. Shapes: B samples, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.tensors import as_float, checked_mask
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
    """Compute the clipped squared error of the values.

    ℓ = ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²);  without ε: ½·(V − R)².
    The clip is that of PPO's reference code; arXiv 1707.06347 has the loss without it.

    Args:
        values_BT: V, the current predictions, with gradient.
        old_values_BT: V_old, the predictions at the start of the step.
        returns_BT: R, the targets.
        response_mask_BT: 0/1.
        cliprange_value: ε; None does not clip.
        validate: check the tensors for NaN and infinity.

    Returns:
        The loss of each token, 0 outside the mask, and the metrics `vpred_mean` and `vf_clipfrac`.

    Raises:
        ShapeError, MaskError, NonFiniteError.
        AlgorithmError: a negative clip range.
    """
    if cliprange_value is not None and cliprange_value < 0:
        raise AlgorithmError(
            f"`cliprange_value` must be at least 0, but received {cliprange_value}."
        )
    tensors = {"values": values_BT, "old_values": old_values_BT, "returns": returns_BT}
    mask = checked_mask(response_mask_BT, validate, **tensors)
    values, old, returns = (as_float(t).masked_fill(~mask, 0) for t in tensors.values())
    loss = unclipped = (values - returns).square()
    metrics = {"vpred_mean": Partial.mean(values, mask)}
    if cliprange_value is not None:
        # V_old = 1, V = 2, ε = 0.5, so the clipped value is 1.5:
        #     R = 3:  (2 − 3)² = 1 < (1.5 − 3)² = 2.25   V moved far enough: constant, gradient 0
        #     R = 0:  (2 − 0)² = 4 > (1.5 − 0)² = 2.25   V moved away from R: gradient V − R = 2
        near = torch.clamp(values, old - cliprange_value, old + cliprange_value)
        clipped = (near - returns).square()
        loss = torch.maximum(unclipped, clipped)
        metrics["vf_clipfrac"] = Partial.mean((clipped > unclipped).float(), mask)
    return PolicyLoss(0.5 * loss, metrics)
