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
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers
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
from quadriga.engines.memory import PassMemory, Rows, TrainingUse, count_pass
from quadriga.engines.optimizers.rules import MOMENTS
from quadriga.models.log_probs import linear_log_probs
from quadriga.models.memory import (
    META,
    AllocationCounter,
    Bytes,
    EngineMemory,
    kernels_of,
    run_backward,
)
from quadriga.parallel.balancing import owners_of
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.layouts import Degrees, Model, Weight, parallel_layout

_EXPERTS = "Megatron-core's layers with experts are not simulated"


def megatron_memory(model: ModelConfig, engine: EngineConfig, use: TrainingUse) -> EngineMemory:
    """Return the memory of the stage that needs most.

    Raises:
        ConfigError: the model or the ranks do not divide by the degrees.
        ModelError: the folder has no config of a model that the engine computes.
    """
    stages = stage_memories(model, engine, use)
    return max(stages, key=lambda m: sum(m.held.values()) + m.peak("backward", "evaluate"))


def stage_memories(
    model: ModelConfig, engine: EngineConfig, use: TrainingUse
) -> list[EngineMemory]:
    """Return the memory of a rank of each pipeline stage."""
    dtype, trained = compute_dtype(engine.dtype, use.device), use.update is not None
    module = simulated_model(model, use.head, dtype, trained=trained)
    config, sizes = module.config.get_text_config(), sizes_of(engine)
    check_sizes(config, sizes, "engine")
    counts = {name: p.numel() for name, p in module.named_parameters()}
    tied = {name for names in tied_names(module).values() for name in names}
    weights = {
        name: Weight(name, tuple(p.shape), p.itemsize)
        for name, p in module.named_parameters()
        if name not in tied
    }
    stored = megatron_model(
        config, weights, tensor_ranks=sizes.tensor, stages=sizes.pipeline, chunks=sizes.chunks
    )
    found = []
    for stage in range(sizes.pipeline):
        held = _states(stored, degrees_of(sizes, use.ranks), stage, dtype, engine, trained=trained)
        passes = StagePasses(model, engine, config, sizes, use, dtype, stage)
        update, evaluate = passes.count(backward=True), passes.count(backward=False)
        adds = {} if update is None else {"backward": {"activations": update.activations}}
        if evaluate is not None:
            adds["evaluate"] = {"activations": evaluate.forward}
        found.append(
            EngineMemory(
                held=held,
                adds=adds,
                missing=next((p.problem for p in (update, evaluate) if p), ""),
                weights={None: sum(counts.values())},  # the rollout is sent other tensors
                largest_weight=max(counts.values()),
            )
        )
    return found


def _states(
    stored: Model,
    degrees: Degrees,
    stage: int,
    dtype: torch.dtype,
    engine: EngineConfig,
    *,
    trained: bool,
) -> Bytes:
    """Return parameters, gradients and the optimizer's state of the first rank of a stage."""
    one = degrees if degrees.spread > 1 else replace(degrees, replicas=1)
    layout = parallel_layout(stored, one)
    first = next(rank for rank in layout.ranks if one.place(rank).stage == stage)
    experts = {tensor.name for tensor in stored.stored if tensor.expert is not None}
    of_both: dict[bool, list[int]] = {False: [], True: []}
    for tensor in layout.ranks[first]:
        of_both[tensor.name in experts].append(torch.Size(tensor.shape).numel())
    elements = sum(map(sum, of_both.values()))
    if not trained:
        return {"parameters": elements * dtype.itemsize}
    owned = 0
    parts = max(degrees.expert, degrees.spread)
    data = degrees.world_size // degrees.pipeline // degrees.tensor
    for of_expert, sizes in of_both.items():
        replicas = data * (degrees.tensor if degrees.spread > 1 else 1) // parts
        count = replicas if of_expert else data
        owned += _largest_share(sizes, count) if engine.distributed_optimizer else sum(sizes)
    wide = torch.float32.itemsize
    copies = wide if dtype.itemsize < wide else 0
    return {
        "parameters": elements * dtype.itemsize,
        "gradients": elements * wide,
        "optimizer states": owned * (len(MOMENTS) * max(wide, dtype.itemsize) + copies),
    }


def _largest_share(sizes: list[int], ranks: int) -> int:
    """Return the elements of the rank that updates most."""
    loads = [0] * ranks
    for size, owner in zip(sizes, owners_of(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads)


@dataclass(frozen=True)
class StagePasses:
    """Counts the passes of a pipeline stage."""

    model: ModelConfig
    engine: EngineConfig
    config: PreTrainedConfig
    sizes: Sizes
    use: TrainingUse
    dtype: torch.dtype
    stage: int

    def count(self, *, backward: bool) -> PassMemory | None:
        """Return the memory of a pass with all micro-batches that are in flight."""
        rows = self.use.update if backward else self.use.evaluate
        if rows is None:
            return None
        if expert_count(self.config):
            return PassMemory(rows.count, problem=_EXPERTS)
        split = self.sizes.sequence_parallel
        one_rank = replace(
            self.engine, name="fsdp", tensor_parallel_size=1, pipeline_parallel_size=1
        )
        found = count_pass(
            self._chunk(1 if split else self.sizes.tensor, trained=backward),
            self.model,
            one_rank,
            replace(self.use, head="value"),
            backward=backward,
            stages=self.sizes.pipeline,
        )
        assert found is not None
        if found.problem:
            return found
        found = replace(found, tokens=-(-found.tokens // self.sizes.context))
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
        if self.use.head != "lm" or self.stage < self.sizes.pipeline - 1:
            return found
        # A context-parallel rank can have responses only.
        targets = found.rows * rows.response
        if self.sizes.context > 1:
            targets = min(targets, found.tokens)
        width = self.config.hidden_size
        own = -(-self.config.vocab_size // self.sizes.tensor)
        empty = partial(torch.empty, dtype=self.dtype, device=META, requires_grad=backward)
        hidden, weight, counter = empty(targets, width), empty(own, width), AllocationCounter()
        with (
            kernels_of(self.use.device_type, entropies_have_gradients=rows.entropy == "gradient"),
            counter,
            torch.set_grad_enabled(backward),
        ):
            labels = torch.zeros(targets, dtype=torch.int64, device=META)
            outputs = linear_log_probs(hidden, weight, labels, entropy=rows.entropy != "unused")
            if backward:
                run_backward(outputs[0].sum() + outputs[1].sum())
        # The hidden states of all tokens, and those of the targets in the engine's own copy.
        states = (found.tokens + targets) * width * self.dtype.itemsize
        peak = found.saved + states + counter.peak
        return replace(
            found,
            forward=max(found.forward, peak),
            activations=max(found.activations, peak) if backward else 0,
        )
