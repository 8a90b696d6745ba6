"""verl's policy losses under their own names, over ours.

A loss takes (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) and gives (the aggregated loss, metrics under "actor/…"). `config` is verl's
actor configuration, or anything with its names: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`,
`clip_ratio_c`, `tau_pos`, `tau_neg`, `policy_loss.*`, and `global_batch_info` for the counts of the
whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.policy_losses import compute_policy_loss as our_policy_loss
from quadriga.algorithms.policy_losses import select_tokens
from quadriga.compat.verl.core_algos import agg_loss, setting
from quadriga.errors import InputError, UnknownNameError

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Any]]]

REPORTED = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


def _compute(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, dict[str, float]]:
    result = our_policy_loss(
        name,
        log_prob_BT=log_prob,
        old_log_prob_BT=old_log_prob,
        advantages_BT=advantages,
        response_mask_BT=response_mask,
        importance_weights_BT=rollout_is_weights,
        **{key: value for key, value in settings.items() if value is not None},
    )
    scale = setting(config, "global_batch_info", {})
    loss = agg_loss(result.loss_BT, response_mask, loss_agg_mode, **dict(scale))
    metrics = dict.fromkeys((f"actor/{key}" for key in REPORTED), 0.0)
    for key in set(REPORTED) & set(result.metrics):
        share = result.metrics[key]
        metrics[f"actor/{key}"] = float(share.total / share.weight.clamp(min=1))
    return loss, metrics


def _clips(config: Any) -> dict[str, Any]:
    if config is None:
        raise InputError("This policy loss reads its clip range from config.clip_ratio; got None.")
    both = setting(config, "clip_ratio", None)
    return {
        "clip_ratio_low": setting(config, "clip_ratio_low", both),
        "clip_ratio_high": setting(config, "clip_ratio_high", both),
    }


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """PPO's clipped loss with the dual clip."""
    clips = {**_clips(config), "clip_ratio_c": setting(config, "clip_ratio_c", 3.0)}
    return _compute(
        "ppo_clip", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, **clips,
    )  # fmt: skip


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GSPO in its form for each token, as there."""
    return _compute(
        "gspo_token", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, **_clips(config),
    )  # fmt: skip


def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """SAPO; always a mean over sequences of a mean over tokens, as there."""
    taus = {key: setting(config, key, None) for key in ("tau_pos", "tau_neg")}
    return _compute(
        "sapo", old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean", config,
        rollout_is_weights, **taus,
    )  # fmt: skip


def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GPG: the plain policy gradient."""
    loss, _ = _compute(
        "gpg", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights,
    )  # fmt: skip
    return loss, {}


def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Clip-Cov; tokens are selected among the rows given, as there. Which of those in the range
    are taken is our draw, and tokens that the plain clip cut may be among them."""
    names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    return _with_selection(
        "clip_cov", names, _clips(config), old_log_prob, log_prob, advantages, response_mask,
        loss_agg_mode, config, rollout_is_weights,
    )  # fmt: skip


def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """KL-Cov; tokens are selected among the rows given, and `ppo_kl` is the mean of |log ratio|,
    as there."""
    coefficient = {"ppo_kl_coef": _policy_setting(config, "ppo_kl_coef")}
    loss, _ = _with_selection(
        "kl_cov", ("kl_cov_ratio",), coefficient, old_log_prob, log_prob, advantages,
        response_mask, loss_agg_mode, config, rollout_is_weights,
    )  # fmt: skip
    distance = (log_prob - old_log_prob).detach().abs()[response_mask.bool()]
    return loss, {"actor/ppo_kl": float(distance.mean()) if distance.numel() else 0.0}


def _with_selection(
    name: str,
    select_settings: tuple[str, ...],
    settings: dict[str, Any],
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
    rollout_is_weights: Tensor | None,
) -> tuple[Tensor, dict[str, Any]]:
    given = {key: _policy_setting(config, key) for key in select_settings}
    selected = select_tokens(
        name,
        old_log_prob_BT=log_prob.detach(),
        advantages_BT=advantages,
        response_mask_BT=response_mask,
        **{key: value for key, value in given.items() if value is not None},
    )
    return _compute(
        name, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, selected_BT=selected, **settings,
    )  # fmt: skip


def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """GMPO: one number a sequence, always averaged over sequences; `loss_agg_mode` is not used."""
    return _compute(
        "geo_mean", old_log_prob, log_prob, advantages, response_mask, "seq-mean-token-mean",
        config, rollout_is_weights, **_clips(config),
    )  # fmt: skip


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """CISPO."""
    return _compute(
        "cispo", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
        rollout_is_weights, **_clips(config),
    )  # fmt: skip


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


POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {
    "vanilla": compute_policy_loss_vanilla,
    "gspo": compute_policy_loss_gspo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
    "clip_cov": compute_policy_loss_clip_cov,
    "kl_cov": compute_policy_loss_kl_cov,
    "geo_mean": compute_policy_loss_geo_mean,
    "cispo": compute_policy_loss_cispo,
}


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
    if name not in POLICY_LOSS_REGISTRY:
        raise UnknownNameError(
            f"No policy loss {name!r}. Known: {', '.join(POLICY_LOSS_REGISTRY)}.",
            name=name,
            known=list(POLICY_LOSS_REGISTRY),
            nearest=None,
        )
    return POLICY_LOSS_REGISTRY[name]


def _policy_setting(config: Any, key: str) -> Any:
    return setting(setting(config, "policy_loss", None), key, None)
