"""The entropy bonus of the actor's loss. Shapes: B samples, T tokens."""

from __future__ import annotations

from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.tensors import checked_mask


def entropy_bonus(
    entropy_BT: Tensor, response_mask_BT: Tensor, *, entropy_coeff: float, validate: bool = True
) -> PolicyLoss:
    """Compute ℓ = −c·H (arXiv 1602.01783, section 4), a term of the actor's loss.

    Args:
        entropy_BT: H, the entropy of each token's distribution in nats, with gradient.
        response_mask_BT: 0/1.
        entropy_coeff: c.
        validate: check `entropy_BT` for NaN and infinity.

    Returns:
        The loss of each token, 0 outside the mask, and the metric `entropy`.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask = checked_mask(response_mask_BT, validate, entropy=entropy_BT)
    kept = entropy_BT.masked_fill(~mask, 0)
    return PolicyLoss(-entropy_coeff * kept, {"entropy": Partial.mean(kept, mask)})
