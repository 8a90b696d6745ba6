"""The loss of a reward model on pairs of responses.

P: pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    The margin is that of Llama 2 (arXiv 2307.09288, equation 2).

    Args:
        chosen_P, rejected_P: scores of the better and the worse response.
        margin_P: by how much the first should exceed the second.
    """
    difference_P = chosen_P - rejected_P - margin_P
    loss_P = torch.nn.functional.softplus(-difference_P)
    return PairwiseLoss(loss_P, torch.sigmoid(-difference_P))
