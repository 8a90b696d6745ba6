"""verl's policy losses under their own names, over ours.

A loss takes (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) and gives (the aggregated loss, metrics under "actor/…"). `config` is verl's
actor configuration, or anything with its names: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`,
`clip_ratio_c`, `tau_pos`, `tau_neg`, `policy_loss.*`, and `global_batch_info` for the counts of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from quadriga.algorithms.policy_losses import compute_policy_loss as our_policy_loss
from quadriga.algorithms.policy_losses import select_tokens
from quadriga.compat.verl.core_algos import agg_loss, registered, setting
from quadriga.errors import InputError

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
Result = tuple[Tensor, dict[str, Any]]

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
REPORTED = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


class VerlPolicyLoss(Protocol):
    """The form of every loss here; log-probabilities, advantages and mask [B, T]."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = ...,
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> Result: ...


@dataclass
class Given:
    """What a caller of verl's form has given, and our loss of it."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: Any
    rollout_is_weights: Tensor | None

    def loss(self, name: str, loss_agg_mode: str | None = None, **settings: Any) -> Result:
        """Our loss `name`, aggregated, with verl's metrics; settings that are None are ours."""
        result = our_policy_loss(
            name,
            log_prob_BT=self.log_prob,
            old_log_prob_BT=self.old_log_prob,
            advantages_BT=self.advantages,
            response_mask_BT=self.response_mask,
            importance_weights_BT=self.rollout_is_weights,
            **{key: value for key, value in settings.items() if value is not None},
        )
        scale = setting(self.config, "global_batch_info", {})
        mode = loss_agg_mode or self.loss_agg_mode
        loss = agg_loss(result.loss_BT, self.response_mask, mode, **dict(scale))
        metrics = dict.fromkeys((f"actor/{key}" for key in REPORTED), 0.0)
        for key in set(REPORTED) & set(result.metrics):
            share = result.metrics[key]
            metrics[f"actor/{key}"] = float(share.total / share.weight.clamp(min=1))
        return loss, metrics

    def selected(self, name: str, *settings: str) -> Tensor:
        """The tokens that Clip-Cov and KL-Cov treat apart, among the rows given; [B, T] bool."""
        given = {key: self.policy_setting(key) for key in settings}
        return select_tokens(
            name,
            old_log_prob_BT=self.log_prob.detach(),
            advantages_BT=self.advantages,
            response_mask_BT=self.response_mask,
            **{key: value for key, value in given.items() if value is not None},
        )

    def clips(self) -> dict[str, Any]:
        """The clip range of `config`. Raises InputError without one."""
        if self.config is None:
            raise InputError(
                "This policy loss reads its clip range from config.clip_ratio; got None."
            )
        both = setting(self.config, "clip_ratio", None)
        return {
            "clip_ratio_low": setting(self.config, "clip_ratio_low", both),
            "clip_ratio_high": setting(self.config, "clip_ratio_high", both),
        }

    def policy_setting(self, key: str) -> Any:
        """`config.policy_loss.<key>`."""
        return setting(setting(self.config, "policy_loss", None), key, None)


def _verls(
    name: str, default_mode: str = "token-mean"
) -> Callable[[Callable[[Given], Result]], VerlPolicyLoss]:
    """Gives a function of `Given` verl's form and adds it under verl's name for it."""

    def of(function: Callable[[Given], Result]) -> VerlPolicyLoss:
        @wraps(function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Result:
            return function(
                Given(
                    old_log_prob,
                    log_prob,
                    advantages,
                    response_mask,
                    loss_agg_mode,
                    config,
                    rollout_is_weights,
                )
            )

        del loss.__wrapped__  # help() and inspect show the form that is called
        POLICY_LOSS_REGISTRY[name] = loss
        return loss

    return of


@_verls("vanilla")
def compute_policy_loss_vanilla(given: Given) -> Result:
    """PPO's clipped loss with the dual clip."""
    dual = setting(given.config, "clip_ratio_c", 3.0)
    return given.loss("ppo_clip", **given.clips(), clip_ratio_c=dual)


@_verls("gspo", "seq-mean-token-mean")
def compute_policy_loss_gspo(given: Given) -> Result:
    """GSPO in its form for each token, as there."""
    return given.loss("gspo_token", **given.clips())


@_verls("sapo", "seq-mean-token-mean")
def compute_policy_loss_sapo(given: Given) -> Result:
    """SAPO; always a mean over sequences of a mean over tokens, as there."""
    taus = {key: setting(given.config, key, None) for key in ("tau_pos", "tau_neg")}
    return given.loss("sapo", "seq-mean-token-mean", **taus)


@_verls("gpg")
def compute_policy_loss_gpg(given: Given) -> Result:
    """GPG: the plain policy gradient."""
    loss, _ = given.loss("gpg")
    return loss, {}


@_verls("clip_cov")
def compute_policy_loss_clip_cov(given: Given) -> Result:
    """Clip-Cov; tokens are selected among the rows given, as there. Which of those in the range
    are taken is our draw, and tokens that the plain clip cut may be among them."""
    selected = given.selected("clip_cov", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    return given.loss("clip_cov", **given.clips(), selected_BT=selected)


@_verls("kl_cov")
def compute_policy_loss_kl_cov(given: Given) -> Result:
    """KL-Cov; tokens are selected among the rows given, and `ppo_kl` is the mean of |log ratio|,
    as there."""
    selected = given.selected("kl_cov", "kl_cov_ratio")
    coefficient = given.policy_setting("ppo_kl_coef")
    loss, _ = given.loss("kl_cov", ppo_kl_coef=coefficient, selected_BT=selected)
    log_ratio = (given.log_prob - given.old_log_prob).detach()
    distance = log_ratio.abs()[given.response_mask.bool()]
    return loss, {"actor/ppo_kl": float(distance.mean()) if distance.numel() else 0.0}


@_verls("geo_mean")
def compute_policy_loss_geo_mean(given: Given) -> Result:
    """GMPO: one number a sequence, always averaged over sequences; `loss_agg_mode` is not used."""
    return given.loss("geo_mean", "seq-mean-token-mean", **given.clips())


@_verls("cispo")
def compute_policy_loss_cispo(given: Given) -> Result:
    """CISPO."""
    return given.loss("cispo", **given.clips())


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped loss in the older form: (loss, clip share, KL, share of the dual clip)."""
    config = {
        "clip_ratio": cliprange,
        "clip_ratio_low": cliprange_low,
        "clip_ratio_high": cliprange_high,
        "clip_ratio_c": clip_ratio_c,
    }
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    clipped, kl, lower = (loss.new_tensor(metrics[f"actor/{key}"]) for key in REPORTED)
    return loss, clipped, kl, lower


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean"
) -> Tensor:
    """The aggregated entropy of each token's distribution; logits [B, T, V]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return agg_loss(-(log_probs.exp() * log_probs).sum(-1), response_mask, loss_agg_mode)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Add a loss of verl's form under `name`, for `get_policy_loss_fn`.

    Our trainer wants the loss of each token, which a function that aggregates cannot give: for it
    use `quadriga.algorithms.register_policy_loss`.
    """

    def add(function: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = function
        return function

    return add


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The loss of that name. Raises UnknownNameError."""
    return registered(POLICY_LOSS_REGISTRY, name, "policy loss")
