"""What ranks receive and hold when an actor on Megatron-core becomes a rollout on the same ranks.

The numbers are those of the plan that the weight syncs of the run execute (`weight_sync.plan`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from quadriga.config.role_ranks import num_ranks, role_ranks
from quadriga.config.schema import TrainConfig
from quadriga.engines.loading import simulated_model
from quadriga.engines.megatron.families import check_sizes, megatron_model, padded_vocabulary
from quadriga.engines.megatron.settings import degrees_of, sizes_of
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.layouts import (
    Degrees,
    Layout,
    Model,
    Weight,
    parallel_layout,
    replicated_layout,
)
from quadriga.rollout import rollout_of
from quadriga.weight_sync.plan import plan
from quadriga.workers.runtime import groups_of_copies

MIB = 2**20


@dataclass(frozen=True)
class Resharding:
    """Bytes of the rank with most, in the dtype of the rollout.

    Attributes:
        ranks: parallel degrees of training.
        gen_tensor: ranks that generate together.
        whole: of all weights.
        received: in each weight sync.
        generating: of the weights that a rank generates with.
        training: of the weights that a rank trains, which it keeps beside them: the tensors of both
            engines are stored in different forms.
    """

    ranks: Degrees
    gen_tensor: int
    whole: int
    received: int
    generating: int
    training: int


def resharding(config: TrainConfig, device_type: str) -> Resharding | None:
    """Return what the weight syncs of a run do. None: the actor is not on Megatron-core, or the
    rollout has ranks of its own.

    Raises:
        ConfigError: the model does not divide by the ranks.
        ModelError: the folder has no config of a model that Megatron-core computes.
    """
    policy, ranks = config.actor_rollout_ref, role_ranks(config)
    engine, rollout = policy.actor.engine, policy.rollout
    if engine.name != "megatron" or ranks["actor"] != ranks["rollout"]:
        return None
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    itemsize = compute_dtype(rollout.dtype, auto).itemsize
    module = simulated_model(policy.model, "lm", torch.float32, trained=False)
    model_config = module.config.get_text_config()
    sizes = sizes_of(engine)
    check_sizes(model_config, sizes, "actor_rollout_ref.actor.engine")
    weights = {
        name: Weight(name, tuple(p.shape), itemsize) for name, p in module.named_parameters()
    }
    stored = megatron_model(
        model_config,
        weights,
        tensor_ranks=sizes.tensor,
        stages=sizes.pipeline,
        chunks=sizes.chunks,
    )
    together = rollout_of(rollout).ranks_of_copy
    # Further replicas do the same among themselves; context-parallel ranks are replicas, too.
    ranks_of_one = sizes.tensor * sizes.pipeline * sizes.expert
    if sizes.spread_experts:
        ranks_of_one = math.lcm(sizes.tensor, sizes.expert) * sizes.pipeline
    one = degrees_of(replace(sizes, context=1), math.lcm(ranks_of_one, together))
    training = parallel_layout(stored, one)
    generation = replicated_layout(weights.values(), training.ranks)
    if together > 1:
        parts = _rollout_model(model_config, weights, together)
        shards = parallel_layout(parts, Degrees(tensor=together)).ranks
        groups = groups_of_copies(engine, len(training.ranks), together)
        held = {rank: shards[i] for group in groups for i, rank in enumerate(group)}
        generation = Layout(parts.weights, held)
    found = plan(training, generation)
    whole = sum(weight.num_bytes for weight in weights.values())
    return Resharding(
        ranks=degrees_of(sizes, num_ranks(config, "actor")),
        gen_tensor=together,
        whole=whole,
        received=max(found.received_bytes(rank) for rank in training.ranks),
        generating=max(generation.own_bytes(rank) for rank in generation.ranks),
        training=max(training.own_bytes(rank) for rank in training.ranks),
    )


def _rollout_model(config: PreTrainedConfig, weights: Mapping[str, Weight], ranks: int) -> Model:
    """Return how so many ranks of vLLM store a model: as Megatron-core, but q, k and v are divided
    each by itself, and a vocabulary is padded to a multiple of 64."""
    model = megatron_model(config, weights, tensor_ranks=ranks, stages=1)
    padded = padded_vocabulary(config, math.lcm(64, ranks))
    stored = (
        replace(one, fusion="parts", padded=padded if one.padded else 0) for one in model.stored
    )
    return replace(model, stored=tuple(stored))


def resharding_lines(config: TrainConfig, device_type: str) -> list[str]:
    """Return the same as lines of a table; [] if it is None."""
    found = resharding(config, device_type)
    if found is None:
        return []
    at = found.ranks
    parts = max(at.expert, at.spread)
    experts = f" × {parts} (experts)" if parts > 1 else ""
    sizes = (found.received, found.generating, found.training)
    return [
        f"weights of a rank in MiB, model {found.whole / MIB:.4g}: trained by {at.tensor} (tensor) "
        f"× {at.pipeline} (stages){experts} × {at.replicas} (replicas), generated with by "
        f"{found.gen_tensor}",
        f"  {'':<26}{'received':>10}{'generate':>10}{'beside':>10}",
        f"  {'this run':<26}" + "".join(f"{size / MIB:>10.4g}" for size in sizes),
    ]
