"""verl's policy losses under verl's names, computed by `quadriga.algorithms.policy_losses`.

A loss takes (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights) and returns (aggregated loss, metrics under "actor/…"). `config` is verl's actor
configuration or any object with these settings: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`,
`clip_ratio_c`, `tau_pos`, `tau_neg`, `policy_loss.*`, and `global_batch_info` with the counts of
the global batch.

Shapes: B samples, T response tokens. All tensors are [B, T].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quadriga.algorithms.policy_losses import compute_policy_loss as token_losses, select_tokens
from quadriga.compat.verl.config import VerlConfig, number, setting
from quadriga.compat.verl.core_algos import agg_loss, registered
from quadriga.errors import InputError

Metrics: TypeAlias = dict[str, float]
Result: TypeAlias = tuple[Tensor, Metrics]
PolicyLossFn: TypeAlias = Callable[..., tuple[Tensor, Mapping[str, object]]]
LossSettings: TypeAlias = dict[str, Any]
"""Keyword arguments of a loss. Settings that are missing from verl's configuration are left out."""

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
REPORTED = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
"""Metrics of a Quadriga loss that verl reports under "actor/"."""


@dataclass
class LossArguments:
    """The arguments of one call of a loss with verl's signature."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: VerlConfig
    rollout_is_weights: Tensor | None

    def loss(
        self,
        name: str,
        settings: LossSettings | None = None,
        loss_agg_mode: str | None = None,
        selected: Tensor | None = None,
    ) -> Result:
        """Compute Quadriga's loss `name` and aggregate it. Return (loss, verl's metrics)."""
        result = token_losses(
            name, log_prob_BT=self.log_prob, old_log_prob_BT=self.old_log_prob,
            advantages_BT=self.advantages, response_mask_BT=self.response_mask,
            importance_weights_BT=self.rollout_is_weights, selected_BT=selected, **(settings or {}),
        )  # fmt: skip
        counts: Mapping[str, int] = setting(self.config, "global_batch_info", {})
        mode = loss_agg_mode or self.loss_agg_mode
        loss = agg_loss(result.loss_BT, self.response_mask, mode, **counts)
        metrics = dict.fromkeys((f"actor/{key}" for key in REPORTED), 0.0)
        # A metric is a (total, weight) pair, so that parts of a batch can be added. verl reports
        # the mean. A part without tokens has weight 0.
        for key in set(REPORTED) & set(result.metrics):
            mean = result.metrics[key]
            metrics[f"actor/{key}"] = float(mean.total / mean.weight.clamp(min=1))
        return loss, metrics

    def selected(self, name: str, *settings: str) -> Tensor | None:
        """Select the tokens that Clip-Cov and KL-Cov treat separately; bool [B, T].

        verl selects them among the rows of one micro-batch, by the current log-probabilities.
        """
        return select_tokens(
            name, old_log_prob_BT=self.log_prob.detach(), advantages_BT=self.advantages,
            response_mask_BT=self.response_mask, **self.policy_settings(*settings),
        )  # fmt: skip

    def clips(self) -> LossSettings:
        """Return the clip range of `config`. Raises `InputError` if `config` is None."""
        if self.config is None:
            text = "This policy loss reads its clip range from config.clip_ratio; got config=None."
            raise InputError(text)
        both = number(self.config, "clip_ratio")
        sides = {side: number(self.config, side) for side in ("clip_ratio_low", "clip_ratio_high")}
        return _without_none(**{side: both if v is None else v for side, v in sides.items()})

    def policy_settings(self, *names: str) -> LossSettings:
        """Return the settings `config.policy_loss.<name>` that are given."""
        source: VerlConfig = setting(self.config, "policy_loss")
        return _without_none(**{name: number(source, name) for name in names})


def _without_none(**settings: float | None) -> LossSettings:
    return {name: value for name, value in settings.items() if value is not None}


def _register(
    name: str, default_mode: str = "token-mean"
) -> Callable[[Callable[[LossArguments], Result]], PolicyLossFn]:
    """Return a decorator that gives a function of `LossArguments` verl's signature.

    The result is registered under verl's `name`. `default_mode`: the default of `loss_agg_mode`.
    """

    def add(function: Callable[[LossArguments], Result]) -> PolicyLossFn:
        @wraps(function, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default_mode,
            config: VerlConfig = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Result:
            tensors = old_log_prob, log_prob, advantages, response_mask
            return function(LossArguments(*tensors, loss_agg_mode, config, rollout_is_weights))

        del loss.__wrapped__  # help() and inspect.signature then show verl's signature
        POLICY_LOSS_REGISTRY[name] = loss
        return loss

    return add


@_register("vanilla")
def compute_policy_loss_vanilla(given: LossArguments) -> Result:
    """Compute PPO's clipped loss with the dual clip."""
    dual = number(given.config, "clip_ratio_c", 3.0)
    return given.loss("ppo_clip", {**given.clips(), "clip_ratio_c": dual})


@_register("gspo", "seq-mean-token-mean")
def compute_policy_loss_gspo(given: LossArguments) -> Result:
    """Compute GSPO's loss in its token form, as verl does."""
    return given.loss("gspo_token", given.clips())


@_register("sapo", "seq-mean-token-mean")
def compute_policy_loss_sapo(given: LossArguments) -> Result:
    """Compute SAPO's loss. It is always aggregated by `seq-mean-token-mean`, as in verl."""
    taus = {name: number(given.config, name) for name in ("tau_pos", "tau_neg")}
    return given.loss("sapo", _without_none(**taus), "seq-mean-token-mean")


@_register("gpg")
def compute_policy_loss_gpg(given: LossArguments) -> Result:
    """Compute the policy gradient of GPG: −A log π, without a ratio and without clipping."""
    loss, _ = given.loss("gpg")
    return loss, {}


@_register("clip_cov")
def compute_policy_loss_clip_cov(given: LossArguments) -> Result:
    """Compute Clip-Cov's loss. Tokens are selected among the given rows, as in verl.

    The selection differs from verl's in two points: it draws other tokens of the same range, and it
    may select tokens whose ratio PPO's clip already bounds.
    """
    selected = given.selected("clip_cov", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    return given.loss("clip_cov", given.clips(), selected=selected)


@_register("kl_cov")
def compute_policy_loss_kl_cov(given: LossArguments) -> Result:
    """Compute KL-Cov's loss. Tokens are selected among the given rows, as in verl.

    The metric `actor/ppo_kl` is the mean of |log π − log π_old|, as in verl.
    """
    selected = given.selected("kl_cov", "kl_cov_ratio")
    loss, _ = given.loss("kl_cov", given.policy_settings("ppo_kl_coef"), selected=selected)
    log_ratio = (given.log_prob - given.old_log_prob).detach()
    distance = log_ratio.abs()[given.response_mask.bool()]
    return loss, {"actor/ppo_kl": float(distance.mean()) if distance.numel() else 0.0}


@_register("geo_mean")
def compute_policy_loss_geo_mean(given: LossArguments) -> Result:
    """Compute GMPO's loss, one ratio per sequence. `loss_agg_mode` is ignored, as in verl.

    The loss is always the mean over sequences.
    """
    return given.loss("geo_mean", given.clips(), "seq-mean-token-mean")


@_register("cispo")
def compute_policy_loss_cispo(given: LossArguments) -> Result:
    """Compute CISPO's loss."""
    return given.loss("cispo", given.clips())


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
    """Compute PPO's clipped loss with the signature of older versions of verl.

    Return (loss, fraction of clipped tokens, approximate KL, fraction clipped by the dual clip).
    """
    config = {"clip_ratio": cliprange, "clip_ratio_c": clip_ratio_c}
    config |= {"clip_ratio_low": cliprange_low, "clip_ratio_high": cliprange_high}
    tensors = (old_log_prob, log_prob, advantages, response_mask)
    loss, metrics = compute_policy_loss_vanilla(*tensors, loss_agg_mode, config)
    clipped, kl, lower = (loss.new_tensor(metrics[f"actor/{key}"]) for key in REPORTED)
    return loss, clipped, kl, lower


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean"
) -> Tensor:
    """Aggregate the entropy of the token distributions; `logits` [B, T, V], V vocabulary."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return agg_loss(-(log_probs.exp() * log_probs).sum(-1), response_mask, loss_agg_mode)


def register_policy_loss(name: str) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Return a decorator that adds a loss with verl's signature, for `get_policy_loss_fn`.

    Quadriga's trainer cannot use such a loss: it needs the loss of each token, and verl's signature
    returns an aggregated loss. Register losses for the trainer with
    `quadriga.algorithms.policy_losses.register_policy_loss`.
    """

    def add(function: PolicyLossFn) -> PolicyLossFn:
        POLICY_LOSS_REGISTRY[name] = function
        return function

    return add


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the loss of that name. Raises `UnknownNameError` if there is none."""
    return registered(POLICY_LOSS_REGISTRY, name, "policy loss")
