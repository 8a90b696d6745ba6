"""The memory of `FSDPEngine` on one rank: parameter shards, gradients, moments and buffers.

An engine holds the shards all the time. In an optimizer step it also holds, at most:

    forward     activations + gathered parameters + the buffer of a gather
    backward    activations + gathered parameters + gradients + the buffers of a reduction
    reduction   gathered parameters + gradients + the buffers of a reduction
    update      gradient shards + what the optimizer allocates

The largest of the four is the peak. `sharding.py` says what a unit is, and `FSDPEngine` when
gradients are reduced. With `engine.offload_policy`, shards of parameters and gradients and the
optimizer's state are in host memory, which on a CPU is the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import sharding
from quadriga.engines.base import HeadKind
from quadriga.engines.loading import simulated_model
from quadriga.engines.memory.optimizer_step import Updated, optimizer_bytes, step_bytes
from quadriga.engines.memory.passes import Passes, PassMemory, Rows
from quadriga.engines.memory.states import TrainingMemory
from quadriga.engines.memory.traffic import Traffic, Unit, elements, shard_elements
from quadriga.engines.optimizers.choice import rule_of_each
from quadriga.engines.tensor_parallel import divide_layers, whole_weights
from quadriga.models.adapters.lora import BASE, is_adapter
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.model_ranks import ModelRanks


def fsdp_memory(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    head: HeadKind,
    ranks: int,
    device_type: str,
    update: Rows | None,
    evaluate: Rows | None,
    optim: OptimConfig | None = None,
    min_unit_parameters: int = sharding.MIN_UNIT_PARAMETERS,
) -> TrainingMemory:
    """Return the memory of the engine that `build_engine` builds with these settings.

    Args:
        ranks: ranks of the worker group.
        device_type: "cpu", or the type of an accelerator.
        update: the rows of one rank in an optimizer step. None: the engine is not trained.
        evaluate: the rows of one rank in a pass without gradients. None: there is none.
        optim: None: the default optimizer.

    Raises:
        ModelError: the folder has no config of a suitable model.
    """
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    dtype, reduce_dtype = (compute_dtype(d, auto) for d in (engine.dtype, engine.reduce_dtype))
    module = simulated_model(model, head, dtype, trained=update is not None)
    sizes = [parameter.numel() for parameter in module.parameters()]
    weights = {name: p for name, p in module.named_parameters() if not is_adapter(name)}
    adapted = [p for name, p in weights.items() if name.endswith(f"{BASE}.weight")]
    trained = [p for p in weights.values() if p.requires_grad]
    tensor = engine.tensor_parallel_size
    if tensor > 1:
        divide_layers(module, ModelRanks.simulated(engine), None)
        min_unit_parameters = 0
    layout = _Layout.of(
        module,
        tensor=tensor,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        ranks=ranks // tensor,
        shards=ranks // tensor if engine.fsdp_size == -1 else engine.fsdp_size,
        optim=None if update is None else optim or OptimConfig(),
        gloo=device_type == "cpu",
        hosted=engine.offload_policy and device_type != "cpu",
        min_unit_parameters=min_unit_parameters,
    )
    passes = Passes(module, model, engine, head, device_type)
    counts = passes.count(update, backward=True), passes.count(evaluate, backward=False)
    return replace(
        layout.memory(engine, *counts),
        uncounted=passes.problem,
        weights=sum(sizes),
        largest_weight=max(sizes),
        adapted=elements(adapted),
        trained=elements(trained),
        frozen=elements([*weights.values()]) - elements(adapted) - elements(trained),
    )


@dataclass(frozen=True)
class _Layout:
    """The FSDP units of a model: the parameters of the root, and those of each layer unit.

    Each rank of tensor parallelism has those in `whole` (`id`). Frozen parameters are kept in
    `dtype`, trained ones in `kept_dtype`. Only these have gradients.
    """

    root: list[nn.Parameter]
    layers: list[list[nn.Parameter]]
    buffers: int
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    kept_dtype: torch.dtype
    trained: frozenset[int]
    shards: int
    gloo: bool
    hosted: bool
    updated: list[Updated]
    tensor: int
    whole: frozenset[int]
    copies: int

    @staticmethod
    def of(
        module: PreTrainedModel,
        *,
        tensor: int,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        ranks: int,
        shards: int,
        optim: OptimConfig | None,
        gloo: bool,
        hosted: bool,
        min_unit_parameters: int,
    ) -> _Layout:
        """Divide the parameters of `module` into units, as `shard_model` does.

        Args:
            tensor: ranks of tensor parallelism, which have divided the layers of `module`.
            ranks: that compute the same part of each layer.
            shards: those of them that share one copy; `tensor` times as many share the root.
            optim: None if the model is not trained.
            hosted: whether shards and the optimizer's state are in host memory.
            gloo: whether collectives are those of gloo, whose reduction copies its input.
        """
        layers = [list(layer.parameters()) for layer in sharding.decoder_layers(module)]
        layers = [layer for layer in layers if elements(layer) >= min_unit_parameters]
        in_layers = {id(parameter) for layer in layers for parameter in layer}
        rules = {} if optim is None else rule_of_each(module, optim.name)
        # Rows of the root are divided twice: ⌈⌈n / t⌉ / s⌉ = ⌈n / (t · s)⌉.
        shapes = {
            name: (
                math.ceil(len(p) / (1 if id(p) in in_layers else tensor)), *p.shape[1:]
            ) if p.dim() else ()
            for name, p in module.named_parameters()
        }  # fmt: skip
        return _Layout(
            root=[p for p in module.parameters() if id(p) not in in_layers],
            layers=layers,
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            kept_dtype=torch.promote_types(dtype, torch.float32),
            trained=frozenset(id(p) for p in module.parameters() if p.requires_grad and optim),
            shards=shards,
            gloo=gloo,
            hosted=hosted,
            tensor=tensor,
            whole=frozenset(whole_weights(module) if tensor > 1 else ()),
            copies=ranks // shards,
            updated=[Updated(shapes[name], rule) for name, rule in rules.items()],
        )

    @property
    def all(self) -> list[nn.Parameter]:
        """All parameters."""
        return [*self.root, *(p for layer in self.layers for p in layer)]

    def learning(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the parameters that are trained."""
        return [p for p in parameters if id(p) in self.trained]

    def shard_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the bytes of the largest rank's shards: rows are divided and rounded up."""
        in_root = {id(p) for p in self.root}
        found = 0
        for p in parameters:
            shards = self.shards * (self.tensor if id(p) in in_root else 1)
            dtype = self.kept_dtype if id(p) in self.trained else self.dtype
            found += dtype.itemsize * shard_elements(p, shards)
        return found

    def _sent(self, *, again: bool, reduces: bool) -> Traffic:
        """Return what a rank sends; `again`: the backward pass gathers layers again."""
        of = partial(Unit.of, trained=self.trained, copies=self.copies)
        root = of(self.root, ranks=self.shards * self.tensor)
        layers = [of(layer, ranks=self.shards) for layer in self.layers]
        sent = Traffic.of(root, layers, self.dtype, self.reduce_dtype, again=again)
        # Gradients of several micro-batches are added up in the dtype of the reduction.
        dtype = self.dtype if reduces else self.reduce_dtype
        whole = [p for p in self.learning(self.all) if id(p) in self.whole]
        return sent.with_sums(self.whole_bytes(whole, dtype), self.tensor)

    def memory(
        self, engine: EngineConfig, update: PassMemory | None, evaluate: PassMemory | None
    ) -> TrainingMemory:
        """Return the memory with the activations of these passes."""
        states = self.shard_bytes(self.all)
        frees = engine.reshard_after_forward
        passes = self._gathered(frees)
        step, reduces = None, False
        if update is not None:
            early = engine.reduce_each_micro_batch
            if early is None:
                early = self.unsharded_bytes() > sharding.MAX_UNSHARDED_BYTES
            # The last micro-batch always reduces, so a single one does.
            reduces = early or not update.several
            step = (
                self._layered(update, reduces, frees)
                if self.layers
                else self._one_unit(update, reduces)
            )
        moments = optimizer_bytes(self.updated, self.kept_dtype, self.shards) if step else 0
        gradients = self.shard_bytes(self.learning(self.all))
        held = states + (moments + gradients if step else 0)
        return TrainingMemory(
            parameters=self.buffers + (0 if self.hosted else states),
            optimizer=0 if self.hosted else moments,
            on_host=held if self.hosted else 0,
            gathered=step.gathered if step else passes,
            gradients=step.gradients if step else 0,
            buffers=max(
                self._gather_buffer([self.root, *self.layers]), step.reduction if step else 0
            ),
            update=update,
            evaluate=evaluate,
            backward_peak=step.peak if step else 0,
            step_peak=self._gradient_shards() + self._step_bytes() if step else 0,
            evaluate_peak=self._forward_peak(passes, evaluate) if evaluate else 0,
            weights=elements(self.all),
            largest_weight=max(p.numel() for p in self.all),
            sent=self._sent(again=frees and step is not None, reduces=reduces),
        )

    def _gradient_shards(self) -> int:
        """Return the bytes of reduced gradients on the device."""
        return 0 if self.hosted else self.shard_bytes(self.learning(self.all))

    def _step_bytes(self) -> int:
        """Return what the update of the parameters allocates on the device."""
        return step_bytes(self.updated, self.kept_dtype, self.shards, on_cpu=self.gloo)

    def _one_unit(self, update: PassMemory, reduces: bool) -> _Step:
        """Return the bytes of a step if the root is the only unit."""
        gathered = self._gathered(frees=False)
        shards = self._gradient_shards()
        learning = self.learning(self.root)
        new = self.whole_bytes(learning, self.dtype)
        flat = self.whole_bytes(learning, self.reduce_dtype)
        # Gradients from earlier micro-batches: shards, or whole ones in the dtype of the reduction.
        earlier = 0 if not update.several else shards if reduces else flat
        # A gradient is added in place to an earlier one of its own dtype.
        in_place = not reduces and self.dtype == self.reduce_dtype
        both = update.activations if in_place else update.with_gradients
        # The buffer is filled from whole gradients, which are then freed. Gathered parameters have
        # been freed before.
        whole, kept = (earlier, 0) if update.several and not reduces else (new, earlier)
        return _Step(
            gathered=gathered,
            gradients=earlier + (0 if in_place else new),
            reduction=self._reduction(flat),
            peak=max(
                self._forward_peak(gathered + (earlier if reduces else 0), update),
                gathered + earlier + both,
                kept + whole + flat,
                kept + self._reduction(flat),
            ),
        )

    def _layered(self, update: PassMemory, reduces: bool, frees: bool) -> _Step:
        """Return the bytes of a step if layers are units: reduced while others go backward."""
        gathered = self._gathered(frees and reduces)
        layer = max((self.learning(layer) for layer in self.layers), key=elements)
        in_root = self.learning(self.root)
        root, new = self.whole_bytes(in_root, self.dtype), self.whole_bytes(layer, self.dtype)
        shards = self._gradient_shards()
        whole = self.whole_bytes(self.learning(self.all), self.reduce_dtype)
        complete = shards if reduces else whole
        if update.several and not reduces and self.dtype == self.reduce_dtype:
            root = new = 0  # a gradient is added in place to an earlier one of its own dtype
        earlier = complete if update.several else 0
        reduction = self._reduction(self.whole_bytes(layer, self.reduce_dtype))
        root_reduction = self._reduction(self.whole_bytes(in_root, self.reduce_dtype))
        # The last layer is reduced first, when its activations and the logits are gone.
        begun = min(root + new, update.with_gradients - update.activations)
        left = (update.saved - update.logits) * (len(self.layers) - 1) // len(self.layers)
        return _Step(
            gathered=gathered,
            gradients=complete + root + new,
            reduction=max(reduction, root_reduction),
            peak=max(
                self._forward_peak(gathered + (earlier if reduces else 0), update),
                gathered + earlier + update.activations + begun,
                gathered + earlier + root + new + reduction + max(left, 0),
                gathered + complete + root + new + update.activations - update.saved,
                gathered + complete + max(root + new + reduction, root_reduction),
            ),
        )

    def whole_bytes(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> int:
        """Return the bytes of whole tensors of these shapes."""
        return elements(parameters) * dtype.itemsize

    def unsharded_bytes(self) -> int:
        """Return the bytes of `sharding.unsharded_bytes`."""
        return self.whole_bytes(self.all, self.dtype) + self.whole_bytes(
            self.learning(self.all), self.reduce_dtype
        )

    def _gathered(self, frees: bool) -> int:
        """Return the bytes of gathered parameters. `frees`: a layer's are freed after its pass."""
        layers = [self.whole_bytes(layer, self.dtype) for layer in self.layers]
        if frees and layers:
            # An accelerator gathers the next layer while it computes one.
            ahead = 1 if self.shards > 1 and not self.gloo else 0
            layers = [max(layers)] * min(len(layers), 1 + ahead)
        return self.whole_bytes(self.root, self.dtype) + sum(layers)

    def _forward_peak(self, held: int, found: PassMemory) -> int:
        """Return the most bytes of a forward pass. `held`: of parameters and gradients."""
        # FSDP frees the buffer of a gather with the next gather, or at the end of the model's pass.
        buffer = self._gather_buffer(self.layers or [self.root])
        return held + max(found.forward, buffer + found.inside)

    def _gather_buffer(self, units: Sequence[Sequence[nn.Parameter]]) -> int:
        """Return the bytes into which the largest unit is gathered, before it is copied out."""
        gathered = [u for u in units if self.shards * (self.tensor if u is self.root else 1) > 1]
        whole = max(map(elements, gathered), default=0) * self.dtype.itemsize
        # Shards in host memory are copied to the device in their own dtype first.
        copied = max(map(self.shard_bytes, units)) if self.hosted else 0
        return whole + copied

    def _reduction(self, flat: int) -> int:
        """Return what the reduction of gradients allocates; `flat` are the bytes of its input."""
        if self.shards == 1:
            return 3 * flat  # the input, the input divided by a factor, the output
        return flat + flat // self.shards + (flat if self.gloo else 0)


@dataclass(frozen=True)
class _Step:
    """Bytes in an optimizer step, as `TrainingMemory` has them."""

    gathered: int
    gradients: int
    reduction: int
    peak: int
