"""The memory of a Megatron engine on one rank of each pipeline stage.

Parameters, gradients and the optimizer's state follow from the layout of the weights. They exist
all the time. Activations are those of a smaller model: a chunk of the stage's layers, with the
heads, the intermediate size and the vocabulary of one tensor-parallel rank, on the tokens of one
context-parallel rank. With sequence parallelism, they are the activations of one rank, divided by
the tensor-parallel ranks. A stage keeps those of several micro-batches (1F1B with four stages and
more micro-batches):

    stage                          0    1    2    3
    micro-batches in flight        4    3    2    1
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers
from quadriga.engines.base import HeadKind
from quadriga.engines.loading import simulated_model, tied_names
from quadriga.engines.megatron.families import (
    Sizes,
    check_sizes,
    expert_count,
    head_size,
    megatron_model,
    padded_vocabulary,
)
from quadriga.engines.megatron.settings import degrees_of, sizes_of
from quadriga.engines.memory.passes import Passes, PassMemory, Rows
from quadriga.engines.memory.states import TrainingMemory
from quadriga.engines.optimizers.rules import MOMENTS
from quadriga.models.log_probs.vocabulary_parallel import BLOCK_LOGITS
from quadriga.parallel.balancing import owners_of
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.layouts import Degrees, Model, Weight, parallel_layout

_EXPERTS = "Megatron-core's layers with experts are not simulated"
_FORWARD_TILES, _BACKWARD_TILES, _PRODUCT_TILES = {True: 3, False: 2}, {True: 6, False: 5}, 4
"""Blocks of logits of `vocabulary_parallel` that exist at once: forward and backward, with and
without entropy, and while their gradients are multiplied with the hidden states."""


def megatron_memory(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    head: HeadKind,
    ranks: int,
    device_type: str,
    update: Rows | None,
    evaluate: Rows | None,
) -> TrainingMemory:
    """Return the memory of the stage that needs most; see `fsdp_memory` for the arguments.

    Raises:
        ConfigError: the model or the ranks do not divide by the degrees.
        ModelError: the folder has no config of a model that the engine computes.
    """
    stages = stage_memories(
        model, engine, head=head, ranks=ranks, device_type=device_type, update=update,
        evaluate=evaluate,
    )  # fmt: skip
    return max(
        stages,
        key=lambda m: m.parameters + m.optimizer + m.kept + max(m.update_peak, m.evaluate_peak),
    )


def stage_memories(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    head: HeadKind,
    ranks: int,
    device_type: str,
    update: Rows | None,
    evaluate: Rows | None,
) -> list[TrainingMemory]:
    """Return the memory of a rank of each pipeline stage; see `megatron_memory`."""
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    dtype, trained = compute_dtype(engine.dtype, auto), update is not None
    module = simulated_model(model, head, dtype, trained=trained)
    config, sizes = module.config.get_text_config(), sizes_of(engine)
    check_sizes(config, sizes, "engine")
    degrees = degrees_of(sizes, ranks)
    weights = {
        name: Weight(name, tuple(p.shape), p.itemsize) for name, p in module.named_parameters()
    }
    for names in tied_names(module).values():
        for name in names:
            weights.pop(name, None)
    stored = megatron_model(
        config, weights, tensor_ranks=sizes.tensor, stages=sizes.pipeline, chunks=sizes.chunks
    )
    found = []
    for stage in range(sizes.pipeline):
        states = _states(stored, degrees, stage, dtype, engine, trained=trained)
        passes = _StagePasses(model, engine, config, sizes, head, device_type, dtype, stage)
        found.append(_with_passes(states, passes, update, evaluate))
    elements = [parameter.numel() for parameter in module.parameters()]
    return [replace(m, weights=sum(elements), largest_weight=max(elements)) for m in found]


def _states(
    stored: Model,
    degrees: Degrees,
    stage: int,
    dtype: torch.dtype,
    engine: EngineConfig,
    *,
    trained: bool,
) -> TrainingMemory:
    """Return parameters, gradients and the optimizer's state of the first rank of a stage."""
    one = degrees if degrees.spread > 1 else replace(degrees, replicas=1)
    layout = parallel_layout(stored, one)
    first = next(rank for rank in layout.ranks if one.place(rank).stage == stage)
    experts = {tensor.name for tensor in stored.stored if tensor.expert is not None}
    of_both: dict[bool, list[int]] = {False: [], True: []}
    for tensor in layout.ranks[first]:
        of_both[tensor.name in experts].append(_count(tensor.shape))
    elements = sum(map(sum, of_both.values()))
    owned = 0
    parts = max(degrees.expert, degrees.spread)
    data = degrees.world_size // degrees.pipeline // degrees.tensor
    for of_expert, sizes in of_both.items():
        replicas = data * (degrees.tensor if degrees.spread > 1 else 1) // parts
        count = replicas if of_expert else data
        owned += _largest_share(sizes, count) if engine.distributed_optimizer else sum(sizes)
    wide = torch.float32.itemsize
    copies = wide if dtype.itemsize < wide else 0
    return TrainingMemory(
        parameters=elements * dtype.itemsize,
        optimizer=owned * (len(MOMENTS) * max(wide, dtype.itemsize) + copies) if trained else 0,
        kept=elements * wide if trained else 0,
        gathered=0,
        gradients=0,
        buffers=0,
        update=None,
        evaluate=None,
        backward_peak=0,
        step_peak=0,
        evaluate_peak=0,
        weights=0,
        largest_weight=0,
    )


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _largest_share(sizes: list[int], ranks: int) -> int:
    """Return the elements of the rank that updates most."""
    loads = [0] * ranks
    for size, owner in zip(sizes, owners_of(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads)


def _with_passes(
    states: TrainingMemory, passes: _StagePasses, update: Rows | None, evaluate: Rows | None
) -> TrainingMemory:
    trained = passes.count(update, backward=True)
    evaluated = passes.count(evaluate, backward=False)
    return replace(
        states,
        update=trained,
        evaluate=evaluated,
        backward_peak=0 if trained is None else trained.activations,
        evaluate_peak=0 if evaluated is None else evaluated.forward,
        uncounted=passes.problem,
    )


@dataclass
class _StagePasses:
    """Counts the passes of a stage."""

    model: ModelConfig
    engine: EngineConfig
    config: PreTrainedConfig
    sizes: Sizes
    head: HeadKind
    device_type: str
    dtype: torch.dtype
    stage: int
    problem: str = ""

    def count(self, rows: Rows | None, *, backward: bool) -> PassMemory | None:
        """Return the memory of a pass with all micro-batches that are in flight."""
        if rows is None:
            return None
        if expert_count(self.config):
            self.problem = _EXPERTS
            return PassMemory(rows.count, 0, True, 0, 0, 0, 0, 0)
        split = self.sizes.sequence_parallel
        one_rank = replace(
            self.engine, name="fsdp", tensor_parallel_size=1, pipeline_parallel_size=1
        )
        module = self._chunk(1 if split else self.sizes.tensor, trained=backward)
        passes = Passes(
            module, self.model, one_rank, "value", self.device_type, stages=self.sizes.pipeline
        )
        found = passes.count(rows, backward=backward)
        self.problem = passes.problem
        assert found is not None
        # What the ranks of a stage exchange is not counted; the simulated model has other ranks.
        tokens = -(-found.tokens // self.sizes.context)
        found = replace(found, tokens=tokens, exchanged=0)
        if split:
            found = self._split(found)
        found = self._beyond_transformers(found, backward=backward)
        return self._with_head(self._in_flight(found, rows), rows, backward=backward)

    def _chunk(self, tensor: int, *, trained: bool) -> PreTrainedModel:
        """Return the layers of a chunk with the sizes of a tensor-parallel rank, on the meta
        device."""
        config = deepcopy(self.config)
        config.head_dim = head_size(self.config)
        config.num_attention_heads //= tensor
        config.num_key_value_heads //= tensor
        config.intermediate_size //= tensor
        config.vocab_size = padded_vocabulary(self.config, tensor) // tensor
        config.pad_token_id = None
        config.num_hidden_layers //= self.sizes.pipeline * self.sizes.chunks
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        whole = simulated_model(self.model, "value", self.dtype, trained=trained)
        with torch.device("meta"):
            module: PreTrainedModel = type(whole)(config)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.dtype)
        module.requires_grad_(trained)
        if trained:
            checkpoint_layers(module, self.model.gradient_checkpointing)
        return module

    def _split(self, found: PassMemory) -> PassMemory:
        """Return the activations if tensor-parallel ranks split the tokens between layers.

        A layer gathers its input, and the gradient of its input.
        """
        tensor = self.sizes.tensor
        gathered = found.tokens * self.config.hidden_size * self.dtype.itemsize
        return replace(
            found,
            forward=found.forward // tensor + gathered,
            saved=found.saved // tensor,
            activations=found.activations // tensor + 2 * gathered,
        )

    def _beyond_transformers(self, found: PassMemory, *, backward: bool) -> PassMemory:
        """Return the activations with what Megatron-core has, and transformers' model has not.

        A layer keeps sines and cosines for queries and for keys, and a copy of the linear half of
        its gated activation. Without gradients, a layer has for a while about one and a half times
        this half and its input beside what transformers has (measured).
        """
        sizes, config, again = self.sizes, self.config, bool(self.model.gradient_checkpointing)
        half = config.intermediate_size // sizes.tensor
        hidden = config.hidden_size // (sizes.tensor if sizes.sequence_parallel else 1)
        token = found.tokens * self.dtype.itemsize
        if not backward:
            return replace(found, forward=found.forward + 3 * token * (half + hidden) // 2)
        layers = config.num_hidden_layers // sizes.pipeline // sizes.chunks
        of_layer = token * (half + 4 * head_size(config))
        kept = of_layer if again else layers * of_layer
        return replace(
            found,
            saved=found.saved + (0 if again else kept),
            activations=found.activations + kept,
        )

    def _in_flight(self, found: PassMemory, rows: Rows) -> PassMemory:
        """Return the activations of all chunks in flight, the last of which is computed."""
        stages, chunks = self.sizes.pipeline, self.sizes.chunks
        left = stages - self.stage - 1
        flying = left + 1 if chunks == 1 else 2 * left + (chunks - 1) * stages + 1
        # Where tokens limit the micro-batches, there are more of them.
        if found.rows == rows.micro_batch:
            flying = min(flying, chunks * max(stages, -(-rows.count // rows.micro_batch)))
        before = (flying - 1) * found.saved
        # A round of an interleaved schedule has received its inputs before it computes them.
        received = found.tokens * self.config.hidden_size * self.dtype.itemsize
        return replace(
            found,
            forward=found.forward + (stages * received if chunks > 1 else 0),
            saved=found.saved + before,
            activations=found.activations + before,
        )

    def _with_head(self, found: PassMemory, rows: Rows, *, backward: bool) -> PassMemory:
        """Return the activations with the blocks of logits, which the last stage has."""
        if self.head != "lm" or self.stage < self.sizes.pipeline - 1:
            return found
        wide = max(self.dtype.itemsize, torch.float32.itemsize)
        tensor, vocabulary = self.sizes.tensor, self.config.vocab_size
        # A context-parallel rank can have responses only.
        targets = found.rows * rows.response
        if self.sizes.context > 1:
            targets = min(targets, found.tokens)
        own = -(-vocabulary // tensor)
        block = min(targets, max(1, BLOCK_LOGITS * tensor // vocabulary)) * own * wide
        weight, hidden = (n * self.config.hidden_size * wide for n in (own, targets))
        outputs = found.tokens * self.config.hidden_size * self.dtype.itemsize  # of all tokens
        entropy = rows.entropy != "unused"
        forward = found.saved + _FORWARD_TILES[entropy] * block + hidden + outputs
        # Gradients of weight and hidden states, and the product that is added to the first.
        backwards = found.saved + weight + 2 * hidden
        backwards += max(_BACKWARD_TILES[entropy] * block, _PRODUCT_TILES * block + weight)
        return replace(
            found,
            logits=block,
            forward=max(found.forward, forward),
            activations=max(found.activations, forward, backwards) if backward else 0,
        )
