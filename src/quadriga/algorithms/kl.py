"""KL to the reference policy: estimators, reward penalty, loss term, coefficient controllers.

The entropy bonus, the other term of the actor's loss, is here too.

With d = log π − log π_ref at the sampled token, the estimators of KL(π‖π_ref) are from
J. Schulman, "Approximating KL divergence" (2020):
k1 = d,  abs = |d|,  k2 = d²/2,  k3 = e^−d − 1 + d.

As a loss, only k2 has the gradient of KL in expectation. "k1+", "abs+", "k3+" and "low_var_kl+"
have the value of the estimator without + and the gradient of k2 (straight-through). "full" is not
an estimate: `full_kl.kl_full` sums over the vocabulary and needs the logits of both models.

Shapes: B samples, T tokens, V vocabulary entries.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import LOG_RATIO_LIMIT, PolicyLoss
from quadriga.algorithms.registry import look_up
from quadriga.algorithms.tensors import as_float, checked_mask, require_finite, require_same_shape
from quadriga.errors import AlgorithmError, unknown_name

LOW_VARIANCE_LIMIT = 10.0


@dataclass(frozen=True)
class KLEntry:
    """One KL estimator.

    Attributes:
        fn: maps d = log π − log π_ref to the estimate at each token. None: the estimator is not a
            function of d, and `kl_loss` receives its values.
        formula: the formula in the notation of `docs/notation.md`.
        needs: names of inputs other than the log-probabilities.
    """

    fn: Callable[[Tensor], Tensor] | None
    formula: str
    needs: tuple[str, ...] = ()


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    # d = 0.001 gives 4.998e-7. In float32, e^−d − 1 + d subtracts numbers near 1 whose spacing is
    # 6e-8 and returns noise of that size; expm1 computes e^−d − 1 without that loss.
    bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-bounded) + bounded


def _low_variance(d: Tensor) -> Tensor:
    return _k3(d).clamp(max=LOW_VARIANCE_LIMIT)


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return an estimator with the value of `value` and the gradient of k2."""

    # At d = 0.5, k1 has value 0.5 and gradient 1, k2 has value 0.125 and gradient d = 0.5. "k1+":
    #
    #     value(d).detach()          0.5            gradient 0
    #     + k2 − k2.detach()         0.125 − 0.125  gradient 0.5
    #     = "k1+"                    0.5            gradient 0.5
    def estimate(d: Tensor) -> Tensor:
        gradient = _k2(d)
        return value(d).detach() + (gradient - gradient.detach())

    return estimate


KL_ESTIMATORS: dict[str, KLEntry] = {
    "k1": KLEntry(_k1, "d"),
    "abs": KLEntry(torch.abs, "|d|"),
    "k2": KLEntry(_k2, "d² / 2"),
    "k3": KLEntry(_k3, "e^−d − 1 + d, d clamped to ±20"),
    "low_var_kl": KLEntry(_low_variance, "min(k3, 10), gradient 0 above"),
    "k1+": KLEntry(_straight_through(_k1), "value of k1, gradient of k2"),
    "abs+": KLEntry(_straight_through(torch.abs), "value of abs, gradient of k2"),
    "k3+": KLEntry(_straight_through(_k3), "value of k3, gradient of k2"),
    "low_var_kl+": KLEntry(_straight_through(_low_variance), "value of low_var_kl, gradient of k2"),
    "full": KLEntry(None, "Σ_v π_v (log π_v − log π_ref,v), exact", ("full_kl_BT",)),
}
FULL = "full"
# The estimators that are functions of d. The reward penalty can use only these, because it has
# nothing but the log-probabilities of the sampled tokens.
SAMPLED_ESTIMATORS = tuple(name for name, entry in KL_ESTIMATORS.items() if entry.fn is not None)
ALIASES = {"kl": "k1", "mse": "k2", "k2+": "k2", "mse+": "k2", "kl+": "k1+"}


def kl_estimate(log_prob_BT: Tensor, ref_log_prob_BT: Tensor, kind: str) -> Tensor:
    """Estimate KL(π‖π_ref) of each token from the log-probabilities of the sampled tokens.

    Args:
        log_prob_BT: log π, with or without gradient.
        ref_log_prob_BT: log π_ref.
        kind: a name of `SAMPLED_ESTIMATORS` or `ALIASES`.

    Returns:
        [B, T] in nats, float32 or float64.

    Raises:
        UnknownNameError: no estimator has this name.
        ShapeError: the tensors differ in shape.
        AlgorithmError: `kind` is "full", which needs the logits of both models.
    """
    entry = look_up(KL_ESTIMATORS, ALIASES.get(kind, kind), "KL estimator")
    if entry.fn is None:
        raise AlgorithmError(
            f"KL `{kind}` sums over the vocabulary and cannot be computed from the "
            f"log-probabilities of the sampled tokens. Call `kl_full` with the logits of both "
            f"models, or choose one of {', '.join(SAMPLED_ESTIMATORS)}.",
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
) -> PolicyLoss:
    """Compute ℓ = β·KL, a term of the actor's loss (GRPO, arXiv 2402.03300, eq. 3).

    Args:
        log_prob_BT: log π of the sampled tokens, with gradient.
        ref_log_prob_BT: log π_ref of the sampled tokens; may be None for "full".
        response_mask_BT: 0/1.
        kl_loss_coef: β.
        kl_loss_type: a key of `KL_ESTIMATORS` or `ALIASES`.
        full_kl_BT: `kl_full` of each token, with gradient; only "full" reads it.

    Returns:
        The loss of each token, 0 outside the mask, and the metric `kl_loss` (KL before β).

    Raises:
        UnknownNameError, ShapeError, MaskError, NonFiniteError.
        AlgorithmError: the input that `kl_loss_type` reads is None.
    """
    entry = look_up(KL_ESTIMATORS, ALIASES.get(kl_loss_type, kl_loss_type), "KL estimator")
    if entry.fn is None:
        (kl,), mask = _under_mask(response_mask_BT, full_kl=full_kl_BT)
    else:
        given = {"log_prob": log_prob_BT, "ref_log_prob": ref_log_prob_BT}
        (log_prob, ref), mask = _under_mask(response_mask_BT, **given)
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
    """Subtract the KL penalty from the scores: r_t = score_t − β·KL_t (arXiv 1909.08593, eq. 2).

    Args:
        token_level_scores_BT: scores before the penalty.
        log_prob_BT: log π of the sampled tokens.
        ref_log_prob_BT: log π_ref of the sampled tokens.
        response_mask_BT: 0/1.
        kl_coef: β.
        kl_penalty: a name of `SAMPLED_ESTIMATORS` or `ALIASES`.

    Returns:
        (token_level_rewards_BT, kl): the rewards, detached and 0 outside the mask; and the mean
        over samples of their mean KL per token, the input of `AdaptiveKLController.update`.

    Raises:
        UnknownNameError, ShapeError, MaskError, NonFiniteError.
        AlgorithmError: `kl_penalty` is "full".
    """
    given = {"log_prob": log_prob_BT.detach(), "ref_log_prob": ref_log_prob_BT.detach()}
    (log_prob, ref), mask = _under_mask(response_mask_BT, **given)
    require_same_shape("response_mask", mask, token_level_scores=token_level_scores_BT)
    scores = as_float(token_level_scores_BT.detach()).masked_fill(~mask, 0)
    require_finite(token_level_scores=scores)
    kl = kl_estimate(log_prob, ref, kl_penalty)
    lengths = mask.sum(-1)
    samples = (lengths > 0).sum().clamp(min=1)
    mean = (kl.sum(-1) / lengths.clamp(min=1)).sum() / samples
    return scores.sub_(kl, alpha=kl_coef), float(mean)


def entropy_bonus(
    entropy_BT: Tensor, response_mask_BT: Tensor, *, entropy_coeff: float
) -> PolicyLoss:
    """Compute ℓ = −c·H (arXiv 1602.01783, section 4), a term of the actor's loss.

    Args:
        entropy_BT: H, the entropy of each token's distribution in nats, with gradient.
        response_mask_BT: 0/1.
        entropy_coeff: c.

    Returns:
        The loss of each token, 0 outside the mask, and the metric `entropy`.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask = checked_mask(response_mask_BT, entropy=entropy_BT)
    kept = entropy_BT.masked_fill(~mask, 0)
    return PolicyLoss(-entropy_coeff * kept, {"entropy": Partial.mean(kept, mask)})


def _under_mask(
    response_mask_BT: Tensor, **tensors: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return (the tensors with 0 outside the mask, the bool mask).

    d is then 0 outside the mask, and every estimator is 0 at d = 0.

    Raises:
        AlgorithmError: a tensor is None. ShapeError, MaskError, NonFiniteError.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if len(given) < len(tensors):
        missing = next(name for name in tensors if name not in given)
        raise AlgorithmError(
            f"This KL term reads `{missing}`, but received None. Pass it, or choose another "
            f"estimator.",
            tensor=missing,
        )
    mask = checked_mask(response_mask_BT, **given)
    return tuple(as_float(tensor).masked_fill(~mask, 0) for tensor in given.values()), mask


class FixedKLController:
    """A constant KL coefficient.

    Attributes:
        value: the coefficient β.
    """

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""

    def state_dict(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that follows a target KL (arXiv 1909.08593, section 2.2).

    e = clip(KL/target − 1, ±0.2);  β ← β·(1 + e·n/horizon), n the samples since the last update.

    Args:
        kl_coef: the initial β.
        target_kl: the target in nats per token.
        horizon: in samples; larger means slower.

    Raises:
        AlgorithmError: `target_kl` or `horizon` is not above 0.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float) -> None:
        super().__init__(kl_coef)
        if target_kl <= 0 or horizon <= 0:
            raise AlgorithmError(
                f"`target_kl` and `horizon` must be above 0, but received {target_kl} and "
                f"{horizon}."
            )
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Update the coefficient.

        Args:
            current_kl: the measured KL in nats per token.
            n_steps: samples since the last update.
        """
        # β = 0.1, KL = 0.11, target 0.1, n = 50, horizon 100: e = 0.1, so β becomes
        # 0.1 · (1 + 0.1 · 50/100) = 0.105. A KL of 10 · target gives e = 0.2, not 9.
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


KLController = FixedKLController | AdaptiveKLController
KLControllerKind = Literal["fixed", "adaptive"]


def make_kl_controller(
    kind: KLControllerKind, *, kl_coef: float, target_kl: float = 0.1, horizon: float = 10000.0
) -> KLController:
    """Create a controller of the KL coefficient.

    Args:
        kind: "fixed" or "adaptive".
        kl_coef: the (initial) coefficient.
        target_kl, horizon: see `AdaptiveKLController`; "fixed" ignores them.

    Raises:
        UnknownNameError: `kind` is unknown.
        AlgorithmError: `target_kl` or `horizon` is not above 0.
    """
    if kind not in get_args(KLControllerKind):
        raise unknown_name("KL controller", kind, get_args(KLControllerKind))
    if kind == "fixed":
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, target_kl, horizon)
