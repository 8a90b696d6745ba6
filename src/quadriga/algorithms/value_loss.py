"""The loss of the critic, and of a reward model on pairs of responses.

Shapes: B samples, T tokens, P pairs.
"""

from dataclasses import dataclass

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
) -> PolicyLoss:
    """Compute the clipped squared error of the values.

    ℓ = ½·max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²);  without ε: ½·(V − R)².
    The clip is from PPO's reference code; arXiv 1707.06347 has the loss without it.

    Args:
        values_BT: V, the current predictions, with gradient.
        old_values_BT: V_old, the predictions at the start of the step.
        returns_BT: R, the targets.
        response_mask_BT: 0/1.
        cliprange_value: ε; None does not clip.

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
    mask = checked_mask(response_mask_BT, **tensors)
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


@dataclass(frozen=True)
class PairwiseLoss:
    """The loss of each pair and its derivative.

    Attributes:
        loss_P: −log σ(d) in nats, where d is the difference of the scores minus the margin.
        slope_P: σ(−d), the derivative of the loss by the rejected score; by the chosen score it is
            −σ(−d).
    """

    loss_P: Tensor
    slope_P: Tensor


def pairwise_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> PairwiseLoss:
    """Return −log σ(s_chosen − s_rejected − margin) for each pair.

    Without a margin this is the negative log-likelihood of the choices under the model of Bradley
    and Terry (1952), as reward models are trained in Ouyang et al. (arXiv 2203.02155, equation 1).
    The margin is from Llama 2 (arXiv 2307.09288, equation 2).

    Args:
        chosen_P, rejected_P: scores of the better and the worse response.
        margin_P: by how much the first should exceed the second.
    """
    difference_P = chosen_P - rejected_P - margin_P
    loss_P = torch.nn.functional.softplus(-difference_P)
    return PairwiseLoss(loss_P, torch.sigmoid(-difference_P))
