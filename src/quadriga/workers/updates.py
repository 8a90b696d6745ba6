"""One update of the policy or the value model: epochs × mini-batches, one optimizer step each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga.config.schema import ActorConfig, CriticConfig
from quadriga.engines.base import SKIPPED_STEPS
from quadriga.errors import FieldError, LengthError
from quadriga.models.images import MultiModalRows
from quadriga.protocol import DataProto, fields
from quadriga.protocol.dataproto import padding_marks, padding_rows
from quadriga.workers.method_fields import UPDATE_ACTOR, UPDATE_CRITIC
from quadriga.workers.objectives import (
    BatchCounts,
    Partials,
    PolicyObjective,
    ValueObjective,
    mask_with_advantage,
    skips_zero_advantages,
)

if TYPE_CHECKING:
    from quadriga.engines.base import TrainEngine


_ROW = "row"  # number of a row of this rank, by which its images are found


def update_policy(
    engine: TrainEngine,
    data: DataProto,
    config: ActorConfig,
    *,
    responses_per_prompt: int,
    temperature: float,
    length_scale: int,
    data_ranks: int,
    seed: int,
    reference: TrainEngine | None = None,
    mismatch_bound: float = 0.5,
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
            config, counts, scale, old_from_update=old_from_update, mismatch_bound=mismatch_bound
        )
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
    mini: dict[str, Tensor], images: MultiModalRows | None, config: ActorConfig
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
    config: CriticConfig,
    *,
    mini_batch_rows: int,
    epochs: int,
    length_scale: int,
) -> DataProto:
    """Run the optimizer steps of the value model on the rows of this rank.

    Waits for: the other ranks, at each optimizer step. Every rank must call this together.

    Args:
        data: the fields `UPDATE_CRITIC.reads`.
        mini_batch_rows: rows of this rank per optimizer step.

    Returns:
        As `update_policy`.

    Raises:
        LengthError: the ranks have different numbers of mini-batches.
    """
    rows = rows_of_update(data, UPDATE_CRITIC.reads)
    check_mini_batches_of_ranks(engine, len(data), mini_batch_rows)
    steps: list[dict[str, float]] = []
    partials: list[Partials] = []
    for mini in mini_batches(rows, size=mini_batch_rows, epochs=epochs):
        counts = BatchCounts.of(mini[fields.RESPONSE_MASK], engine)
        if counts.tokens == 0:  # on all ranks, see `update_policy`
            continue
        objective = ValueObjective(config, counts=counts, length_scale=length_scale)
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
    data: DataProto,
    steps: Sequence[Mapping[str, float]],
    partials: list[Partials],
    prefix: str,
) -> DataProto:
    metrics = {
        prefix + key: sum(step[key] for step in steps) / len(steps)
        for key in (steps[0] if steps else ())
    }
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
