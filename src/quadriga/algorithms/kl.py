"""Distance to the reference policy: estimators, penalty in the reward, term in the loss,
controllers of its coefficient. Shapes: B samples, T tokens, V words.

With d = log π − log π_ref at the sampled token, the estimators of KL(π‖π_ref) are those of
J. Schulman, "Approximating KL divergence" (2020):
k1 = d,  abs = |d|,  k2 = d²/2,  k3 = e^−d − 1 + d.
As a loss only k2 has the gradient of KL in expectation; "k1+", "abs+", "k3+" have the value of
theirs and the gradient of k2 (straight through). "full" is no estimate: `full_kl.kl_full` sums
over the vocabulary, which wants both models' logits side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.clipped_losses import LOG_RATIO_LIMIT, PolicyLoss
from quadriga.algorithms.partial import Partial
from quadriga.algorithms.registry import look_up
from quadriga.errors import AlgorithmError

LOW_VARIANCE_LIMIT = 10.0


@dataclass(frozen=True)
class KLEntry:
    """One estimator: `fn` maps d = log π − log π_ref to its value at each token.

    `fn` None: it cannot be told from d; `kl_loss` is given its values.
    """

    fn: Callable[[Tensor], Tensor] | None
    formula: str
    needs: tuple[str, ...] = ()


def _k3(d: Tensor) -> Tensor:
    bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-bounded) + bounded


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _low_variance(d: Tensor) -> Tensor:
    return _k3(d).clamp(max=LOW_VARIANCE_LIMIT)


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def estimate(d: Tensor) -> Tensor:
        gradient = _k2(d)
        return value(d).detach() + (gradient - gradient.detach())

    return estimate


def _k1(d: Tensor) -> Tensor:
    return d


KL_ESTIMATORS: dict[str, KLEntry] = {
    "k1": KLEntry(_k1, "d"),
    "abs": KLEntry(torch.abs, "|d|"),
    "k2": KLEntry(_k2, "d² / 2"),
    "k3": KLEntry(_k3, "e^−d − 1 + d, d held within ±20"),
    "low_var_kl": KLEntry(_low_variance, "k3, at most 10 (its gradient ends there)"),
    "k1+": KLEntry(_straight_through(_k1), "value of k1, gradient of k2"),
    "abs+": KLEntry(_straight_through(torch.abs), "value of abs, gradient of k2"),
    "k3+": KLEntry(_straight_through(_k3), "value of k3, gradient of k2"),
    "low_var_kl+": KLEntry(_straight_through(_low_variance), "value of low_var_kl, gradient of k2"),
    "full": KLEntry(None, "Σ_v π_v (log π_v − log π_ref,v), exact", ("full_kl_BT",)),
}
FULL = "full"
# Those that are functions of d; the penalty in the reward has nothing else to go by.
SAMPLED_ESTIMATORS = tuple(name for name, entry in KL_ESTIMATORS.items() if entry.fn is not None)
ALIASES = {"kl": "k1", "mse": "k2", "k2+": "k2", "mse+": "k2", "kl+": "k1+"}


def kl_estimate(log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: str) -> Tensor:
    """KL(π‖π_ref) of each token by the estimator `kind`, nats, at least float32.

    Raises:
        UnknownNameError: no such estimator. ShapeError.
        AlgorithmError: `full`, which cannot be told from the sampled tokens.
    """
    entry = look_up(KL_ESTIMATORS, ALIASES.get(kind, kind), "KL estimator")
    if entry.fn is None:
        raise AlgorithmError(
            f"KL `{kind}` sums over the vocabulary and cannot be told from the sampled tokens' "
            "log-probabilities: compute `kl_full` of both models' logits, or choose one of "
            f"{', '.join(SAMPLED_ESTIMATORS)}.",
            estimator=kind,
        )
    require_same_shape("log_prob", log_prob_BT, ref_log_prob=ref_log_prob_BT)
    return entry.fn(as_float(log_prob_BT) - as_float(ref_log_prob_BT))


def kl_loss(
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor | None,
    response_mask_BT: Tensor,
    *,
    kl_loss_coef: float,
    kl_loss_type: str = "k3",
    full_kl_BT: Tensor | None = None,
    validate: bool = True,
) -> PolicyLoss:
    """ℓ = β·KL, a term to add to the policy's loss of each token (GRPO, arXiv 2402.03300, eq. 3).

    Args:
        ref_log_prob_BT: of the sampled tokens; what `full` does without.
        full_kl_BT: `kl_full` of each token, with its gradient; what only `full` reads.

    Returns:
        Loss of each token, 0 outside the mask; metric `kl_loss` (before β).

    Raises:
        UnknownNameError, ShapeError, MaskError, NonFiniteError.
        AlgorithmError: the input that this type reads is missing.
    """
    entry = look_up(KL_ESTIMATORS, ALIASES.get(kl_loss_type, kl_loss_type), "KL estimator")
    if entry.fn is None:
        (kl,), mask = _under_mask(response_mask_BT, validate, full_kl=full_kl_BT)
    else:
        (log_prob, ref), mask = _under_mask(
            response_mask_BT, validate, log_prob=log_prob_BT, ref_log_prob=ref_log_prob_BT
        )
        kl = kl_estimate(log_prob, ref.detach(), kl_loss_type)
    return PolicyLoss(kl_loss_coef * kl, {"kl_loss": Partial.mean(kl, mask)})


def penalise_rewards(
    token_level_scores_BT: Tensor,
    log_prob_BT: Tensor,
    ref_log_prob_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    kl_coef: float,
    kl_penalty: str = "k1",
) -> tuple[Tensor, float]:
    """Token-level rewards r_t = score_t − β·KL_t, and this batch's KL (arXiv 1909.08593, eq. 2).

    Returns:
        (token_level_rewards_BT, 0 outside the mask, without gradient;
        mean over samples of the mean KL a token, what the adaptive controller wants).

    Raises:
        UnknownNameError, ShapeError, MaskError, NonFiniteError. AlgorithmError: `full`.
    """
    (log_prob, ref), mask = _under_mask(
        response_mask_BT, True, log_prob=log_prob_BT.detach(), ref_log_prob=ref_log_prob_BT.detach()
    )
    require_same_shape("response_mask", mask, token_level_scores=token_level_scores_BT)
    scores = as_float(token_level_scores_BT.detach()).masked_fill(~mask, 0)
    require_finite(token_level_scores=scores)
    kl = kl_estimate(log_prob, ref, kl_penalty)
    lengths = mask.sum(-1)
    samples = (lengths > 0).sum().clamp(min=1)
    mean = (kl.sum(-1) / lengths.clamp(min=1)).sum() / samples
    return scores.sub_(kl, alpha=kl_coef), float(mean)


def _under_mask(
    response_mask_BT: Tensor, validate: bool, **tensors: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(each tensor, 0 outside the mask, so that KL is 0 there; the bool mask)."""
    require_matrix("response_mask", response_mask_BT)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if len(given) < len(tensors):
        missing = next(name for name in tensors if name not in given)
        raise AlgorithmError(
            f"This KL term reads `{missing}`, which was not given.", tensor=missing
        )
    require_same_shape("response_mask", response_mask_BT, **given)
    mask = to_bool_mask(response_mask_BT)
    if validate:
        require_finite(mask, **given)
    return tuple(as_float(tensor).masked_fill(~mask, 0) for tensor in given.values()), mask


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn from."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A coefficient that steers KL towards a target (arXiv 1909.08593, section 2.2).

    e = clip(KL/target − 1, ±0.2);  β ← β·(1 + e·n/horizon), n the samples seen since.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise AlgorithmError(
                f"`target_kl` and `horizon` must be above 0, but are {target_kl} and {horizon}."
            )
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient; `current_kl` in nats a token, `n_steps` in samples."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000.0
) -> KLController:
    """A `fixed` or `adaptive` controller. Raises `UnknownNameError`, `AlgorithmError`."""
    makers: dict[str, Callable[[], KLController]] = {
        "fixed": lambda: FixedKLController(kl_coef),
        "adaptive": lambda: AdaptiveKLController(kl_coef, target_kl, horizon),
    }
    return look_up(makers, kind, "KL controller")()
