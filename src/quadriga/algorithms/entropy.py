"""The entropy bonus. Shapes: B samples, T tokens."""

from __future__ import annotations

from torch import Tensor

from quadriga.algorithms.checks import require_finite, require_same_shape, to_bool_mask
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.partial import Partial


def entropy_bonus(
    entropy_BT: Tensor, response_mask_BT: Tensor, *, entropy_coeff: float, validate: bool = True
) -> PolicyLoss:
    """ℓ = −c·H (arXiv 1602.01783, section 4), a term to add to the policy's loss of each token.

    Args:
        entropy_BT: H of each token's distribution, nats, with gradient.

    Returns:
        Loss of each token, 0 outside the mask; metric `entropy`.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    require_same_shape("response_mask", response_mask_BT, entropy=entropy_BT)
    mask = to_bool_mask(response_mask_BT)
    if validate:
        require_finite(mask, entropy=entropy_BT)
    kept = entropy_BT.masked_fill(~mask, 0)
    return PolicyLoss(-entropy_coeff * kept, {"entropy": Partial.mean(kept, mask)})
