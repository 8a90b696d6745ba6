"""The objectives of the updates: losses of `algorithms`, combined as the settings say.

An objective is called once per micro-batch. It returns the share of that micro-batch in the loss
of the mini-batch: sums over its rows, divided by the counts of the whole mini-batch on all ranks.
The shares add up to the same gradient however the rows are split. Metrics that are not sums are
collected in `partials` as totals with weights, which the controller merges.

If an output of the model is NaN or infinite, the loss is NaN, and so is the gradient. All ranks
then skip the optimizer step and count it (`engines/optimizers/sharded.py`). Inputs of the update
that are not finite raise `NonFiniteError`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import aggregate, count_mask
from quadriga.algorithms.checks import require_finite
from quadriga.algorithms.entropy import entropy_bonus
from quadriga.algorithms.importance import mismatch_statistics
from quadriga.algorithms.kl import kl_loss
from quadriga.algorithms.partial import Partial
from quadriga.algorithms.policy_losses import compute_policy_loss, get_policy_loss
from quadriga.algorithms.value_loss import value_loss
from quadriga.config.schema import (
    ActorConfig,
    AggregationName,
    CriticConfig,
    Options,
    PolicyLossConfig,
)
from quadriga.engines.base import ENTROPY, FULL_KL, LOG_PROBS, VALUES, EntropyUse
from quadriga.errors import NonFiniteError
from quadriga.protocol import fields

if TYPE_CHECKING:
    from quadriga.engines.base import Outputs, TrainEngine

_log = logging.getLogger(__name__)

Loss = tuple[Tensor, Mapping[str, Tensor | float]]
"""The loss of a micro-batch, and metrics that the engine sums over micro-batches and ranks."""

MISMATCH = "mismatch/"
"""Prefix of the metrics of the difference between rollout and training."""

Partials = Mapping[str, Partial]
"""The metrics of one micro-batch by name, as totals with weights."""


@dataclass(frozen=True)
class BatchCounts:
    """Response tokens, and sequences with at least one, of a mini-batch over all ranks."""

    tokens: float
    sequences: float

    @classmethod
    def of(cls, response_mask_BT: Tensor, engine: TrainEngine) -> BatchCounts:
        """Count the rows of this rank and add the counts of all ranks.

        Waits for: the other ranks. Every rank must call this for the same mini-batch.
        """
        return cls(*engine.global_counts(*count_mask(response_mask_BT)))

    def aggregate(
        self,
        loss_BT: Tensor,
        mask_BT: Tensor,
        mode: AggregationName,
        length_scale: float | None = None,
    ) -> Tensor:
        """Return the share of a micro-batch in the loss of the mini-batch."""
        return aggregate(
            loss_BT,
            mask_BT,
            mode,
            global_tokens=self.tokens,
            global_sequences=self.sequences,
            loss_scale_length=length_scale,
        )


def skips_zero_advantages(config: ActorConfig) -> bool:
    """Return whether the update computes no rows whose advantages are all 0.

    Their loss and their gradient are 0 if the loss has no terms beside the policy's. They still
    count in the denominators of the loss.
    """
    return config.skip_zero_advantages is not False and not reads_zero_advantages(config)


def reads_zero_advantages(config: ActorConfig) -> str:
    """Return the settings with which a row whose advantages are all 0 has a gradient; "" if there
    are none."""
    if config.entropy_coeff != 0:
        return f"entropy_coeff={config.entropy_coeff:g}"
    if config.use_kl_loss:
        return "use_kl_loss=true"
    loss = get_policy_loss(config.policy_loss.name)
    return "" if loss.is_zero_without_advantage else f"policy_loss.name={config.policy_loss.name}"


def mask_with_advantage(response_mask_BT: Tensor, advantages_BT: Tensor) -> Tensor:
    """Return the mask with 0 in the rows whose advantages are 0 wherever the mask is 1."""
    kept_BT = advantages_BT.masked_fill(response_mask_BT == 0, 0)
    return response_mask_BT * kept_BT.ne(0).any(-1, keepdim=True).to(response_mask_BT.dtype)


def entropy_use(config: ActorConfig, *, old_from_update: bool) -> EntropyUse:
    """Return what the update of the actor needs of the entropies.

    `old_from_update`: see `PolicyObjective`.
    """
    if config.entropy_coeff != 0 or get_policy_loss(config.policy_loss.name).needs_entropy:
        return "gradient"
    # For the metric alone the gradient is 0, for which the backward pass does no work.
    return "value" if old_from_update else "unused"


def loss_of_damaged(outputs: Outputs, response_mask_BT: Tensor) -> Loss | None:
    """Return a loss of NaN if an output is not finite where the mask is 1, and None otherwise."""
    try:
        require_finite(response_mask_BT.bool(), **outputs)
    except NonFiniteError as error:
        _log.warning("this optimizer step is skipped: %s", error)
        return torch.stack([output.sum() for output in outputs.values()]).sum() * torch.nan, {}
    return None


class PolicyObjective:
    """Policy loss − entropy bonus + KL to the reference, for each token; then aggregated.

    `old_from_update`: the old log-probabilities are those of the update without their gradient.
    Then its metrics contain what the pass that is left out would have given: the entropy, and
    the mismatch of rollout and training with `mismatch_bound` in nats.
    """

    def __init__(
        self,
        config: ActorConfig,
        counts: BatchCounts,
        length_scale: float,
        *,
        old_from_update: bool = False,
        mismatch_bound: float = 0.5,
    ) -> None:
        self.config = config
        self.old_from_update = old_from_update
        self.mismatch_bound = mismatch_bound
        self.counts = counts
        self.length_scale = length_scale
        self.settings = loss_settings(config.policy_loss)
        self.partials: list[Partials] = []

    @property
    def reads_entropy(self) -> bool:
        """Whether the engine must compute the entropy."""
        return entropy_use(self.config, old_from_update=self.old_from_update) != "unused"

    def __call__(self, outputs: Outputs, micro: Mapping[str, Tensor]) -> Loss:
        mask, log_prob = micro[fields.RESPONSE_MASK], outputs[LOG_PROBS]
        if (damaged := loss_of_damaged(outputs, mask)) is not None:
            return damaged
        old = log_prob.detach() if self.old_from_update else micro[fields.OLD_LOG_PROBS]
        policy = compute_policy_loss(
            self.config.policy_loss.name,
            log_prob_BT=log_prob,
            old_log_prob_BT=old,
            advantages_BT=micro[fields.ADVANTAGES],
            response_mask_BT=mask,
            rollout_log_prob_BT=micro.get(fields.ROLLOUT_LOG_PROBS),
            entropy_BT=outputs.get(ENTROPY),
            selected_BT=micro.get(fields.SELECTED_TOKENS),
            importance_weights_BT=micro.get(fields.ROLLOUT_IS_WEIGHTS),
            **self.settings,
        )
        loss_BT = policy.loss_BT
        kept = mask.bool()
        partials = {**policy.metrics, "pg_loss": Partial.mean(loss_BT, kept)}
        if self.config.entropy_coeff:
            bonus = entropy_bonus(outputs[ENTROPY], mask, entropy_coeff=self.config.entropy_coeff)
            loss_BT = loss_BT + bonus.loss_BT
        if self.config.use_kl_loss:
            kl = kl_loss(
                outputs[LOG_PROBS],
                micro.get(fields.REF_LOG_PROB),
                mask,
                kl_loss_coef=self.config.kl_loss_coef,
                kl_loss_type=self.config.kl_loss_type,
                full_kl_BT=outputs.get(FULL_KL),
            )
            partials.update(kl.metrics)
            loss_BT = loss_BT + kl.loss_BT
        if self.old_from_update:
            partials["entropy"] = Partial.mean(outputs[ENTROPY], kept)
        named = {f"actor/{name}": part for name, part in partials.items()}
        if self.old_from_update and fields.ROLLOUT_LOG_PROBS in micro:
            statistics = mismatch_statistics(
                old, micro[fields.ROLLOUT_LOG_PROBS], mask, bound=self.mismatch_bound
            )
            named |= {f"{MISMATCH}{name}": part for name, part in statistics.items()}
        self.partials.append(named)
        mode = self.config.loss_agg_mode
        return self.counts.aggregate(loss_BT, mask, mode, self.length_scale), {}


def loss_settings(policy_loss: PolicyLossConfig) -> Options:
    """Return the clip settings, which every loss accepts, and the options of the chosen loss."""
    return {
        "clip_ratio_low": policy_loss.clip_ratio_low,
        "clip_ratio_high": policy_loss.clip_ratio_high,
        "clip_ratio_c": policy_loss.clip_ratio_c,
        **policy_loss.options,
    }


class ValueObjective:
    """Clipped squared error between values and returns."""

    def __init__(self, config: CriticConfig, counts: BatchCounts, length_scale: float) -> None:
        self.config = config
        self.counts = counts
        self.length_scale = length_scale
        self.partials: list[Partials] = []

    def __call__(self, outputs: Outputs, micro: Mapping[str, Tensor]) -> Loss:
        mask = micro[fields.RESPONSE_MASK]
        if (damaged := loss_of_damaged(outputs, mask)) is not None:
            return damaged
        value = value_loss(
            values_BT=outputs[VALUES],
            old_values_BT=micro[fields.VALUES],
            returns_BT=micro[fields.RETURNS],
            response_mask_BT=mask,
            cliprange_value=self.config.cliprange_value,
        )
        self.partials.append({f"critic/{name}": part for name, part in value.metrics.items()})
        mode = self.config.loss_agg_mode
        return self.counts.aggregate(value.loss_BT, mask, mode, self.length_scale), {}


class SupervisedObjective:
    """Mean of −log p over the response tokens of the whole mini-batch, in nats."""

    def __init__(self, counts: BatchCounts) -> None:
        self.counts = counts

    def __call__(self, outputs: Outputs, micro: Mapping[str, Tensor]) -> Loss:
        mask = micro[fields.RESPONSE_MASK]
        if (damaged := loss_of_damaged(outputs, mask)) is not None:
            return damaged
        return self.counts.aggregate(-outputs[LOG_PROBS], mask, "token-mean"), {}
