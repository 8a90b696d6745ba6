"""One update of the policy or the value model: epochs × mini-batches, one optimizer step each."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial, aggregate, count_mask
from quadriga.algorithms.importance import (
    ImportanceCorrection,
    importance_correction,
    mismatch_statistics,
)
from quadriga.algorithms.kl import entropy_bonus, kl_loss
from quadriga.algorithms.policy_losses import compute_policy_loss, get_policy_loss
from quadriga.algorithms.tensors import require_finite
from quadriga.algorithms.value_loss import value_loss
from quadriga.config import schema
from quadriga.engines.base import ENTROPY, FULL_KL, LOG_PROBS, SKIPPED_STEPS, VALUES, EntropyUse
from quadriga.errors import FieldError, LengthError, NonFiniteError
from quadriga.models.images import MultiModalRows
from quadriga.protocol import DataProto, fields
from quadriga.protocol.dataproto import padding_marks, padding_rows
from quadriga.workers.method_fields import UPDATE_ACTOR, UPDATE_CRITIC

if TYPE_CHECKING:
    from quadriga.engines.base import Outputs, TrainEngine

# The objectives of the updates: losses of `algorithms`, combined as the settings say.
#
# An objective is called once per micro-batch. It returns the share of that micro-batch in the loss
# of the mini-batch: sums over its rows, divided by the counts of the whole mini-batch on all ranks.
# The shares add up to the same gradient however the rows are split. Metrics that are not sums are
# collected in `partials` as totals with weights, which the controller merges.
#
# If an output of the model is NaN or infinite, the loss is NaN, and so is the gradient. All ranks
# then skip the optimizer step and count it (`engines/optimizers.py`). Inputs of the update
# that are not finite raise `NonFiniteError`.

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
        mode: schema.AggregationName,
        length_scale: float | None = None,
    ) -> Tensor:
        """Return the share of a micro-batch in the loss of the mini-batch."""
        return aggregate(
            loss_BT, mask_BT, mode, global_tokens=self.tokens, global_sequences=self.sequences,
            loss_scale_length=length_scale,
        )  # fmt: skip


def skips_zero_advantages(config: schema.ActorConfig) -> bool:
    """Return whether the update computes no rows whose advantages are all 0.

    Their loss and their gradient are 0 if the loss has no terms beside the policy's. They still
    count in the denominators of the loss.
    """
    return config.skip_zero_advantages is not False and not reads_zero_advantages(config)


def reads_zero_advantages(config: schema.ActorConfig) -> str:
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


def entropy_use(config: schema.ActorConfig, *, old_from_update: bool) -> EntropyUse:
    """Return what the update of the actor needs of the entropies.

    `old_from_update`: see `PolicyObjective`.
    """
    if config.entropy_coeff != 0 or "entropy_BT" in get_policy_loss(config.policy_loss.name).needs:
        return "gradient"
    # For the metric alone the gradient is 0, for which the backward pass does no work.
    return "value" if old_from_update else "unused"


@dataclass(kw_only=True)
class Objective(ABC):
    """The share of a micro-batch in a loss; NaN if an output is not finite where the mask is 1.

    Attributes:
        length_scale: tokens by which `seq-mean-token-sum-norm` divides.
        partials: the metrics of the micro-batches so far.
    """

    counts: BatchCounts
    length_scale: float | None = None
    partials: list[Partials] = field(default_factory=list)

    def __call__(self, outputs: Outputs, micro: Mapping[str, Tensor]) -> Loss:
        mask_BT = micro[fields.RESPONSE_MASK]
        try:
            require_finite(mask_BT.bool(), **outputs)
        except NonFiniteError as error:
            _log.warning("this optimizer step is skipped: %s", error)
            return torch.stack([output.sum() for output in outputs.values()]).sum() * torch.nan, {}
        return self.loss(outputs, micro, mask_BT), {}

    @abstractmethod
    def loss(self, outputs: Outputs, micro: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Return the share, from outputs that are finite."""


@dataclass(kw_only=True)
class PolicyObjective(Objective):
    """Policy loss − entropy bonus + KL to the reference, for each token; then aggregated.

    `old_from_update`: the old log-probabilities are those of the update without their gradient.
    Then it corrects the mismatch of rollout and training itself (`correction`), and its metrics
    contain what the pass that is left out would have given: the entropy, and the mismatch with
    `mismatch_bound` in nats.
    """

    config: schema.ActorConfig
    old_from_update: bool = False
    mismatch_bound: float = 0.5
    correction: schema.RolloutCorrectionConfig | None = None

    @property
    def reads_entropy(self) -> bool:
        """Whether the engine must compute the entropy."""
        return entropy_use(self.config, old_from_update=self.old_from_update) != "unused"

    def loss(self, outputs: Outputs, micro: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        log_prob = outputs[LOG_PROBS]
        old = log_prob.detach() if self.old_from_update else micro[fields.OLD_LOG_PROBS]
        rollout, weights = micro.get(fields.ROLLOUT_LOG_PROBS), micro.get(fields.ROLLOUT_IS_WEIGHTS)
        statistics: Partials = {}
        if self.old_from_update and rollout is not None:
            statistics = mismatch_statistics(old, rollout, mask, bound=self.mismatch_bound)
            if (found := importance_weights(self.correction, old, rollout, mask)) is not None:
                weights, statistics = found.weights_BT, {**statistics, **found.statistics}
        policy = compute_policy_loss(
            self.config.policy_loss.name, log_prob_BT=log_prob, old_log_prob_BT=old,
            advantages_BT=micro[fields.ADVANTAGES], response_mask_BT=mask,
            rollout_log_prob_BT=rollout, entropy_BT=outputs.get(ENTROPY),
            selected_BT=micro.get(fields.SELECTED_TOKENS), importance_weights_BT=weights,
            **loss_settings(self.config.policy_loss),
        )  # fmt: skip
        loss_BT = policy.loss_BT
        kept = mask.bool()
        partials = {**policy.metrics, "pg_loss": Partial.mean(loss_BT, kept)}
        if self.config.entropy_coeff:
            bonus = entropy_bonus(outputs[ENTROPY], mask, entropy_coeff=self.config.entropy_coeff)
            loss_BT = loss_BT + bonus.loss_BT
        if self.config.use_kl_loss:
            kl = kl_loss(
                outputs[LOG_PROBS], micro.get(fields.REF_LOG_PROB), mask,
                kl_loss_coef=self.config.kl_loss_coef, kl_loss_type=self.config.kl_loss_type,
                full_kl_BT=outputs.get(FULL_KL),
            )  # fmt: skip
            partials.update(kl.metrics)
            loss_BT = loss_BT + kl.loss_BT
        if self.old_from_update:
            partials["entropy"] = Partial.mean(outputs[ENTROPY], kept)
        named = {f"actor/{name}": part for name, part in partials.items()}
        named |= {f"{MISMATCH}{name}": part for name, part in statistics.items()}
        self.partials.append(named)
        mode = self.config.loss_agg_mode
        return self.counts.aggregate(loss_BT, mask, mode, self.length_scale)


def importance_weights(
    config: schema.RolloutCorrectionConfig | None, old: Tensor, rollout: Tensor, mask: Tensor
) -> ImportanceCorrection | None:
    """Return the importance correction that the settings ask for; None: none."""
    if config is None or config.level is None or config.level == "none":
        return None
    return importance_correction(
        old, rollout, mask, level=config.level, mode=config.mode, upper=config.upper,
        lower=config.lower, normalise=config.normalise,
    )  # fmt: skip


def loss_settings(policy_loss: schema.PolicyLossConfig) -> schema.Options:
    """Return the clip settings, which every loss accepts, and the options of the chosen loss."""
    return {
        "clip_ratio_low": policy_loss.clip_ratio_low,
        "clip_ratio_high": policy_loss.clip_ratio_high,
        "clip_ratio_c": policy_loss.clip_ratio_c,
        **policy_loss.options,
    }


@dataclass(kw_only=True)
class ValueObjective(Objective):
    """Clipped squared error between values and returns."""

    config: schema.CriticConfig

    def loss(self, outputs: Outputs, micro: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        value = value_loss(
            values_BT=outputs[VALUES],
            old_values_BT=micro[fields.VALUES],
            returns_BT=micro[fields.RETURNS],
            response_mask_BT=mask,
            cliprange_value=self.config.cliprange_value,
        )
        self.partials.append({f"critic/{name}": part for name, part in value.metrics.items()})
        mode = self.config.loss_agg_mode
        return self.counts.aggregate(value.loss_BT, mask, mode, self.length_scale)


class SupervisedObjective(Objective):
    """Mean of −log p over the response tokens of the whole mini-batch, in nats."""

    def loss(self, outputs: Outputs, micro: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        return self.counts.aggregate(-outputs[LOG_PROBS], mask, "token-mean")


_ROW = "row"  # number of a row of this rank, by which its images are found


def update_policy(
    engine: TrainEngine,
    data: DataProto,
    config: schema.ActorConfig,
    *,
    responses_per_prompt: int,
    temperature: float,
    length_scale: int,
    data_ranks: int,
    seed: int,
    reference: TrainEngine | None = None,
    mismatch_bound: float = 0.5,
    correction: schema.RolloutCorrectionConfig | None = None,
) -> DataProto:
    """Run the optimizer steps of the policy on the rows of this rank.

    Waits for: the other ranks, at each optimizer step. Every rank must call this together.

    Args:
        data: the fields `UPDATE_ACTOR.reads` and `UPDATE_ACTOR.reads_if_present`. Without
            `old_log_probs`, they are those of the update itself.
        responses_per_prompt: rows per prompt; `ppo_mini_batch_size` counts prompts over all ranks.
        data_ranks, temperature: data-parallel ranks; sampling temperature of the rollout.
        length_scale: tokens by which `seq-mean-token-sum-norm` divides, unless a setting does.
        seed: of the order of the rows where `config.shuffle` is set.
        reference: the engine of the reference policy, for KL over the vocabulary.
        mismatch_bound: nats, as `rollout.mismatch.bound`.
        correction: of old responses, without `old_log_probs`.

    Returns:
        `meta_info["metrics"]`: means over the optimizer steps, and the steps skipped so far, of all
        ranks; and one row of `partials`: metrics to be merged with those of other ranks.

    Raises `LengthError` if ranks have different numbers of mini-batches, and `FieldError` if there
    are several optimizer steps and no `old_log_probs`.
    """
    rows, images = _inputs_of_actor(data)
    epochs, prompts = config.ppo_epochs, config.ppo_mini_batch_size
    size = rows_per_mini_batch(prompts, len(data), responses_per_prompt, data_ranks)
    check_mini_batches_of_ranks(engine, len(data), size)
    if old_from_update := fields.OLD_LOG_PROBS not in rows:
        check_one_step(len(data), size, epochs)
    steps, partials = list[dict[str, float]](), list[Partials]()
    unit = rows_kept_together(rows, responses_per_prompt) if config.shuffle else None
    scale = config.loss_scale_length or length_scale
    step = partial(
        engine.train_step,
        temperature=temperature,
        reference=reference,
        micro_batch_size=config.ppo_micro_batch_size_per_gpu,
    )
    for mini in mini_batches(rows, size=size, epochs=epochs, shuffled_unit=unit, seed=seed):
        counts = BatchCounts.of(mini[fields.RESPONSE_MASK], engine)
        if counts.tokens == 0:  # on all ranks: one alone would leave the others in a collective
            continue
        objective = PolicyObjective(
            config=config, counts=counts, length_scale=scale, old_from_update=old_from_update,
            mismatch_bound=mismatch_bound, correction=correction,
        )  # fmt: skip
        computed, of_rows = _rows_to_compute(mini, images, config)
        steps.append(step(computed, objective, entropy=objective.reads_entropy, images=of_rows))
        partials += objective.partials
    return _report(data, steps, partials, prefix="actor/")


def _inputs_of_actor(data: DataProto) -> tuple[dict[str, Tensor], MultiModalRows | None]:
    """Return the tensors of an update and the images of its rows, if it has some."""
    present = [key for key in UPDATE_ACTOR.reads_if_present if key in data.batch.keys()]  # noqa: SIM118
    rows = rows_of_update(data, (*UPDATE_ACTOR.reads, *present))
    images = MultiModalRows.of(data)
    if images is not None:
        rows[_ROW] = torch.arange(len(data))
    return rows, images


def _rows_to_compute(
    mini: dict[str, Tensor], images: MultiModalRows | None, config: schema.ActorConfig
) -> tuple[dict[str, Tensor], MultiModalRows | None]:
    """Return a mini-batch, with response mask 0 in the rows that need no computation, and its
    images, which are found among those of all rows."""
    of_rows = None if images is None else images.select(mini.pop(_ROW))
    if not skips_zero_advantages(config):
        return mini, of_rows
    mask = mask_with_advantage(mini[fields.RESPONSE_MASK], mini[fields.ADVANTAGES])
    return {**mini, fields.RESPONSE_MASK: mask}, of_rows


def update_values(
    engine: TrainEngine,
    data: DataProto,
    config: schema.CriticConfig,
    *,
    responses_per_prompt: int,
    data_ranks: int,
    length_scale: int,
) -> DataProto:
    """Run the optimizer steps of the value model on the rows of this rank.

    Waits for: the other ranks, at each optimizer step. Every rank must call this together.

    Args:
        data: the fields `UPDATE_CRITIC.reads`.
        responses_per_prompt, data_ranks, length_scale: as of `update_policy`.

    Returns:
        As `update_policy`.

    Raises:
        LengthError: the ranks have different numbers of mini-batches.
    """
    rows = rows_of_update(data, UPDATE_CRITIC.reads)
    prompts, epochs = config.ppo_mini_batch_size, config.ppo_epochs or 1
    size = rows_per_mini_batch(prompts, len(data), responses_per_prompt, data_ranks)
    check_mini_batches_of_ranks(engine, len(data), size)
    steps, partials = list[dict[str, float]](), list[Partials]()
    for mini in mini_batches(rows, size=size, epochs=epochs):
        counts = BatchCounts.of(mini[fields.RESPONSE_MASK], engine)
        if counts.tokens == 0:  # on all ranks, see `update_policy`
            continue
        objective = ValueObjective(config=config, counts=counts, length_scale=length_scale)
        steps.append(
            engine.train_step(mini, objective, micro_batch_size=config.ppo_micro_batch_size_per_gpu)
        )
        partials += objective.partials
    return _report(data, steps, partials, prefix="critic/")


def rows_of_update(data: DataProto, names: Iterable[str]) -> dict[str, Tensor]:
    """Return these tensors of a batch, with response mask 0 in rows that are padding.

    Padding then has no part in a loss, a count or a metric, and is not computed.
    """
    rows = {name: data.batch[name] for name in names}
    mask_BT = rows[fields.RESPONSE_MASK]
    padding_B1 = padding_rows(data)[:, None].to(mask_BT.device)
    rows[fields.RESPONSE_MASK] = mask_BT.masked_fill(padding_B1, 0)
    return rows


def rows_per_mini_batch(
    prompts: int | None, rows: int, responses_per_prompt: int, data_ranks: int
) -> int:
    """Return the rows of this rank in one mini-batch, rounded up: 7 rows on 2 ranks give 4 each.

    Args:
        prompts: `ppo_mini_batch_size`, which counts prompts over all ranks. None: all rows.
        rows: the rows of this rank.
    """
    return max(1, rows if prompts is None else -(-prompts * responses_per_prompt // data_ranks))


def check_mini_batches_of_ranks(engine: TrainEngine, rows: int, size: int) -> None:
    """Check that all ranks have equally many mini-batches.

    Otherwise a rank with fewer would leave the others waiting in a collective. Waits for: the other
    ranks, which all raise the error.

    Args:
        rows: the rows of this rank.
        size: the rows of this rank in a mini-batch.

    Raises:
        LengthError: the numbers differ.
    """
    count = max(1, math.ceil(rows / size))
    ranks, total, squares = engine.global_counts(1, count, count**2)
    # Cauchy-Schwarz: ranks · Σ n² = (Σ n)² only if all n are equal, and every rank sees the same
    # sums. A comparison with the mean would be right on a rank that has the mean.
    if ranks * squares != total**2:
        raise LengthError(
            f"the ranks have different numbers of mini-batches: {total:.0f} on {ranks:.0f} ranks, "
            f"{count} on this one ({rows} rows, {size} in a mini-batch). Give every rank equally "
            "many rows, or choose ppo_mini_batch_size so that the rows of a mini-batch divide by "
            "the number of ranks"
        )


def check_one_step(rows: int, size: int, epochs: int) -> None:
    """Check that an update without `old_log_probs` is one optimizer step.

    Raises:
        FieldError: in a second step the weights would not be those that generated.
    """
    steps = epochs * max(1, math.ceil(rows / size))
    if steps > 1:
        raise FieldError(
            f"update_actor got no field {fields.OLD_LOG_PROBS!r}, which it needs for {steps} "
            f"optimizer steps ({rows} rows in mini-batches of {size} × {epochs} epochs); call "
            "compute_log_prob before it, or make one optimizer step",
            field=fields.OLD_LOG_PROBS,
        )


def shuffle_seed(seed: int, optimizer_steps: int) -> int:
    """Return the seed of the order of the rows in an update.

    It depends on the seed of the run and on the optimizer steps before the update, which a
    checkpoint holds: a resumed run shuffles as an uninterrupted one.
    """
    state = np.random.SeedSequence([seed, optimizer_steps]).generate_state(1, dtype=np.uint64)
    return int(state[0] >> np.uint64(1))


def rows_kept_together(rows: Mapping[str, Tensor], responses_per_prompt: int) -> int:
    """Return the number of neighbouring rows that a shuffle keeps together.

    It is `responses_per_prompt` if the rows of this rank are whole prompt groups, so that a prompt
    is computed in one mini-batch only. Otherwise it is 1.
    """
    count, n = len(rows[fields.RESPONSE_MASK]), responses_per_prompt
    if count % n:
        return 1
    width = rows[fields.INPUT_IDS].shape[1] - rows[fields.RESPONSE_MASK].shape[1]
    prompts = (rows[key][:, :width] for key in (fields.INPUT_IDS, fields.ATTENTION_MASK))
    groups = (prompt.reshape(count // n, n, width) for prompt in prompts)
    return n if all(bool((group == group[:, :1]).all()) for group in groups) else 1


def mini_batches(
    rows: Mapping[str, Tensor],
    *,
    size: int,
    epochs: int,
    shuffled_unit: int | None = None,
    seed: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yield all rows `epochs` times, `size` rows at a time.

    The last mini-batch of an epoch may be smaller: 5 rows with size 2 give rows 0 1, 2 3 and 4.

    Args:
        shuffled_unit: draw a new order for each epoch, in which this number of neighbouring rows
            stay neighbours; it must divide the number of rows. None: the order of the rows.
        seed: of the orders that are drawn.
    """
    count = len(rows[fields.RESPONSE_MASK])
    # A generator of its own: the process-wide one is also used by the engine, and its state
    # would then depend on what ran before.
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.arange(count)
        if shuffled_unit is not None:
            # Four rows in units of 2, permutation 1 0 of the two units: rows 2 3 0 1.
            units = torch.randperm(count // shuffled_unit, generator=generator)
            order = order.view(-1, shuffled_unit)[units].flatten()
        # A rank without rows yields one empty mini-batch, since all ranks count tokens together.
        for start in range(0, max(count, 1), size):
            part = order[start : start + size]
            yield {key: value[part] for key, value in rows.items()}


def _report(
    data: DataProto, steps: Sequence[Mapping[str, float]], partials: list[Partials], prefix: str
) -> DataProto:
    names = steps[0] if steps else ()
    metrics = {prefix + key: sum(step[key] for step in steps) / len(steps) for key in names}
    if steps and SKIPPED_STEPS in steps[-1]:  # the steps that were skipped so far
        metrics[prefix + SKIPPED_STEPS] = steps[-1][SKIPPED_STEPS]
    # The batch of one row makes the reports of the ranks join like any result: row r is rank r's.
    row = np.empty(1, dtype=object)
    row[0] = partials
    # Without the marks, the report of a rank that received padding would be taken for its rows.
    marks = {name: np.zeros(1, dtype=bool) for name in padding_marks(data)}
    return DataProto.from_dict(
        tensors={},
        non_tensors={fields.PARTIALS: row, **marks},
        meta_info={"metrics": {**metrics, prefix + "optimizer_steps": float(len(steps))}},
    )
