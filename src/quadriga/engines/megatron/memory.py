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

from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers
from quadriga.engines.loading import simulated_model, tied_names
from quadriga.engines.megatron import families
from quadriga.engines.memory import PassMemory, Rows, TrainingUse, count_pass
from quadriga.engines.optimizers import MOMENTS
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
from quadriga.parallel.layouts import Weight, parallel_layout

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
    planned = _Planned(model, engine, use)
    passes = {"backward": use.update, "evaluate": use.evaluate}
    counted = {
        name: (planned.chunk_pass(rows, backward=name == "backward"), rows)
        for name, rows in passes.items()
        if rows is not None
    }
    counts = [p.numel() for p in planned.module.parameters()]
    # Copies in float32 are among the optimizer's states.
    wide = planned.dtype.itemsize >= torch.float32.itemsize
    return [
        EngineMemory(
            held=held,
            adds={
                name: {"activations": planned.peak(found, rows, stage, name == "backward")}
                for name, (found, rows) in counted.items()
            },
            flags=families.core_flags(use.device_type, planned.config),
            missing=next((found.problem for found, _ in counted.values()), ""),
            rows={name: found.rows for name, (found, _) in counted.items()},
            weights={None: sum(counts)},  # the rollout is sent other tensors
            largest_weight=max(counts),
            saved=sum(held.get(what, 0) for what in ("optimizer states", *["parameters"] * wide))
            if use.update is not None
            else 0,
        )
        for stage, held in enumerate(map(planned.states, range(planned.stages)))
    ]


class _Planned:
    """A model on the ranks of an engine."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, use: TrainingUse) -> None:
        self.model, self.engine, self.use = model, engine, use
        self.dtype = compute_dtype(engine.dtype, use.device)
        self.module = simulated_model(model, use.head, self.dtype, trained=use.update is not None)
        self.config = self.module.config.get_text_config()
        self.tensor, self.stages = engine.tensor_parallel_size, engine.pipeline_parallel_size
        self.chunks = engine.virtual_pipeline_parallel_size
        families.check_sizes(self.config, engine, "engine")

    def states(self, stage: int) -> Bytes:
        """Return parameters, gradients and the optimizer's state of the first rank of a stage."""
        tied = {n for names in tied_names(self.module).values() for n in names}
        weights = {
            name: Weight(name, tuple(p.shape), p.dtype)
            for name, p in self.module.named_parameters()
            if name not in tied
        }
        stored = families.megatron_model(self.config, weights, self.engine)
        degrees = families.degrees_of(self.engine, self.use.ranks)
        one = degrees if degrees.spread > 1 else replace(degrees, replicas=1)
        layout = parallel_layout(stored, one)
        first = next(rank for rank in layout.ranks if one.place(rank).stage == stage)
        experts = {tensor.name for tensor in stored.stored if tensor.expert is not None}
        of_kind: dict[bool, list[int]] = {False: [], True: []}  # of experts: True
        for tensor in layout.ranks[first]:
            of_kind[tensor.name in experts].append(torch.Size(tensor.shape).numel())
        elements = sum(map(sum, of_kind.values()))
        parameters = {"parameters": elements * self.dtype.itemsize}
        if self.use.update is None:
            return parameters
        data = degrees.world_size // degrees.pipeline // degrees.tensor
        replicas = data * (degrees.tensor if degrees.spread > 1 else 1)
        replicas //= max(degrees.expert, degrees.spread)
        owned = elements
        if self.engine.distributed_optimizer:
            owned = _largest_share(of_kind[False], data) + _largest_share(of_kind[True], replicas)
        wide = torch.float32.itemsize
        copies = wide if self.dtype.itemsize < wide else 0
        return parameters | {
            "gradients": elements * wide,
            "optimizer states": owned * (len(MOMENTS) * max(wide, self.dtype.itemsize) + copies),
        }

    def chunk_pass(self, rows: Rows, *, backward: bool) -> PassMemory:
        """Return the memory of one micro-batch in a chunk of layers."""
        if families.expert_count(self.config):
            return PassMemory(rows.count, problem=_EXPERTS)
        split, tensor = self.engine.sequence_parallel, self.tensor
        found = count_pass(
            self._chunk(1 if split else tensor, trained=backward),
            replace(self.engine, name="fsdp", tensor_parallel_size=1, pipeline_parallel_size=1),
            replace(self.use, head="value"),
            rows,
            backward=backward,
            stages=self.stages,
        )
        if found.problem:
            return found
        tokens = -(-found.tokens // self.engine.context_parallel_size)
        token = tokens * self.dtype.itemsize
        forward, saved, peak = found.forward, found.saved, found.peak
        if split:
            forward, saved, peak = (size // tensor for size in (forward, saved, peak))
        # Megatron-core keeps sines and cosines for queries and for keys, and a copy of the linear
        # half of the gated activation. Without gradients it has for a while about one and a half
        # times this half and the input of the layer beside what transformers has (measured).
        half = self.config.intermediate_size // tensor
        if backward:
            kept = token * (half + 4 * families.head_size(self.config))
            if not self.model.gradient_checkpointing:
                kept *= self.config.num_hidden_layers // self.stages // self.chunks
                saved += kept
            peak += kept
        else:
            hidden = self.config.hidden_size // (tensor if split else 1)
            forward += 3 * token * (half + hidden) // 2
        return replace(found, tokens=tokens, forward=forward, saved=saved, peak=peak)

    def _chunk(self, tensor: int, *, trained: bool) -> PreTrainedModel:
        """Return the layers of a chunk with the sizes of a tensor-parallel rank, on the meta
        device."""
        config = deepcopy(self.config)
        config.head_dim = families.head_size(self.config)
        config.num_attention_heads //= tensor
        config.num_key_value_heads //= tensor
        config.intermediate_size //= tensor
        config.vocab_size = families.padded_vocabulary(self.config, tensor) // tensor
        config.pad_token_id = None
        config.num_hidden_layers //= self.stages * self.chunks
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
        whole = simulated_model(self.model, "value", self.dtype, trained=trained)
        with META:
            module: PreTrainedModel = type(whole)(config)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.dtype)
        module.requires_grad_(trained)
        if trained:
            checkpoint_layers(module, self.model.gradient_checkpointing)
        return module

    def peak(self, found: PassMemory, rows: Rows, stage: int, backward: bool) -> int:
        """Return the activations of all chunks in flight, the last of which is computed."""
        stages, chunks = self.stages, self.chunks
        if found.problem:
            return 0
        left = stages - stage - 1
        flying = left + 1 if chunks == 1 else 2 * left + (chunks - 1) * stages + 1
        # Where tokens limit the micro-batches, there are more of them.
        if found.rows == rows.micro_batch:
            flying = min(flying, chunks * max(stages, -(-rows.count // rows.micro_batch)))
        of_token: int = self.config.hidden_size * self.dtype.itemsize
        before = (flying - 1) * found.saved
        # A round of an interleaved schedule has received its inputs before it computes them.
        received = stages * found.tokens * of_token if chunks > 1 else 0
        layers = before + found.peak if backward else found.forward + received
        if self.use.head != "lm" or stage < stages - 1:
            return layers
        # A context-parallel rank can have responses only.
        targets = found.rows * rows.response
        if self.engine.context_parallel_size > 1:
            targets = min(targets, found.tokens)
        # The hidden states of all tokens, and those of the targets.
        states = (found.tokens + targets) * of_token
        return max(layers, before + found.saved + states + self._head(targets, rows, backward))

    def _head(self, targets: int, rows: Rows, backward: bool) -> int:
        """Return what the log-probabilities of a micro-batch allocate on the last stage."""
        width, own = self.config.hidden_size, -(-self.config.vocab_size // self.tensor)
        empty = partial(torch.empty, dtype=self.dtype, device=META, requires_grad=backward)
        hidden, weight, counter = empty(targets, width), empty(own, width), AllocationCounter()
        labels = torch.zeros(targets, dtype=torch.int64, device=META)
        with (
            kernels_of(self.use.device_type, entropies_have_gradients=rows.entropy == "gradient"),
            counter,
            torch.set_grad_enabled(backward),
        ):
            outputs = linear_log_probs(hidden, weight, labels, entropy=rows.entropy != "unused")
            if backward:
                run_backward(outputs[0].sum() + outputs[1].sum())
        return counter.peak


def _largest_share(sizes: list[int], ranks: int) -> int:
    """Return the elements of the rank that updates most."""
    loads = [0] * ranks
    for size, owner in zip(sizes, owners_of(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads)
