"""One update of policy or value model: epochs, mini-batches, one optimizer step each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quadriga.config.schema import ActorConfig, CriticConfig
from quadriga.protocol import DataProto
from quadriga.workers.objectives import BatchCounts, PolicyObjective, ValueObjective

if TYPE_CHECKING:
    from quadriga.algorithms.partial import Partial
    from quadriga.engines.base import TrainEngine

MODEL_FIELDS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
POLICY_FIELDS = (*MODEL_FIELDS, "old_log_probs", "advantages")
OPTIONAL_POLICY_FIELDS = (
    "ref_log_prob",
    "rollout_is_weights",
    "rollout_log_probs",
    "selected_tokens",
)
VALUE_FIELDS = (*MODEL_FIELDS, "values", "returns")


def update_policy(
    engine: TrainEngine,
    data: DataProto,
    config: ActorConfig,
    *,
    responses_per_prompt: int,
    temperature: float,
    length_scale: int,
    world_size: int,
    seed: int,
    reference: TrainEngine | None = None,
) -> DataProto:
    """Run the policy's optimizer steps on this rank's rows; every rank calls this together.

    `reference`: the engine beside which each micro-batch is computed, for KL over the vocabulary.

    Returns:
        `meta_info["metrics"]`, each the mean over the optimizer steps and the same on every rank,
        and one row of `partials`, this rank's share of the metrics that are to be joined.
    """
    optional = [key for key in OPTIONAL_POLICY_FIELDS if key in data.batch.keys()]  # noqa: SIM118
    rows = {key: data.batch[key] for key in (*POLICY_FIELDS, *optional)}
    steps: list[dict[str, float]] = []
    partials: list[Mapping[str, Partial]] = []
    for mini in mini_batches(
        rows,
        size=max(1, config.ppo_mini_batch_size * responses_per_prompt // world_size),
        epochs=config.ppo_epochs,
        shuffle=config.shuffle,
        seed=seed,
    ):
        counts = BatchCounts.of(mini["response_mask"], engine)
        if counts.tokens == 0:  # on every rank alike: nothing to learn from, so no step
            continue
        objective = PolicyObjective(
            config,
            counts=counts,
            length_scale=config.loss_scale_length or length_scale,
        )
        steps.append(
            engine.train_step(
                mini,
                objective,
                temperature=temperature,
                entropy=objective.reads_entropy,
                reference=reference,
                micro_batch_size=config.ppo_micro_batch_size_per_gpu,
            )
        )
        partials += objective.partials
    return _report(steps, partials, prefix="actor/")


def update_values(
    engine: TrainEngine,
    data: DataProto,
    config: CriticConfig,
    *,
    mini_batch_rows: int,
    epochs: int,
    length_scale: int,
) -> DataProto:
    """The value model's counterpart of `update_policy`."""
    rows = {key: data.batch[key] for key in VALUE_FIELDS}
    steps: list[dict[str, float]] = []
    partials: list[Mapping[str, Partial]] = []
    for mini in mini_batches(rows, size=mini_batch_rows, epochs=epochs):
        counts = BatchCounts.of(mini["response_mask"], engine)
        if counts.tokens == 0:
            continue
        objective = ValueObjective(
            config,
            counts=counts,
            length_scale=length_scale,
        )
        steps.append(
            engine.train_step(mini, objective, micro_batch_size=config.ppo_micro_batch_size_per_gpu)
        )
        partials += objective.partials
    return _report(steps, partials, prefix="critic/")


def mini_batches(
    rows: Mapping[str, Tensor], *, size: int, epochs: int, shuffle: bool = False, seed: int = 0
) -> Iterator[dict[str, Tensor]]:
    """`epochs` times all rows, `size` at a time; the last one of an epoch may be smaller."""
    count = len(rows["response_mask"])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
        for part in order.split(size):
            yield {key: value[part] for key, value in rows.items()}


def _report(
    steps: list[dict[str, float]], partials: list[Mapping[str, Partial]], prefix: str
) -> DataProto:
    means = {
        prefix + key: sum(step[key] for step in steps) / len(steps)
        for key in (steps[0] if steps else ())
    }
    row = np.empty(1, dtype=object)
    row[0] = partials
    return DataProto.from_dict(
        tensors={},
        non_tensors={"partials": row},
        meta_info={"metrics": {**means, prefix + "optimizer_steps": float(len(steps))}},
    )
