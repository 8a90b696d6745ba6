"""The memory of `FSDPEngine` on one rank: parameter shards, gradients, moments and buffers.

An engine holds the shards all the time. In an optimizer step it also holds, at most:

    forward     activations + gathered parameters + the buffer of a gather
    backward    activations + gathered parameters + gradients + the buffers of a reduction
    reduction   gathered parameters + gradients + the buffers of a reduction
    step        gradient shards + what the optimizer allocates

The largest of the first three is the peak of "backward". `sharding.py` says what a unit is, and
`FSDPEngine` when gradients are reduced. With `engine.offload_policy`, shards of parameters and
gradients and the optimizer's state are in host memory, which on a CPU is the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig, OptimizerName
from quadriga.engines import sharding
from quadriga.engines.loading import simulated_model, whole_load_reason
from quadriga.engines.memory import PassMemory, TrainingUse, count_pass
from quadriga.engines.optimizers.choice import rule_of_each, state_bytes
from quadriga.engines.optimizers.muon import newton_schulz
from quadriga.engines.tensor_parallel import divide_layers
from quadriga.models.adapters import BASE, is_adapter
from quadriga.models.memory import META, AllocationCounter, Bytes, EngineMemory, largest
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.model_ranks import ModelRanks

EIGHT_BIT_STEP_BYTES = 53
"""For each element of a parameter shard, what a step of torchao's AdamW allocates where it is not
compiled (on a CPU): decoded moments in float32 and codes in int64. Measured."""


def fsdp_memory(
    model: ModelConfig,
    engine: EngineConfig,
    use: TrainingUse,
    *,
    min_unit_parameters: int = sharding.MIN_UNIT_PARAMETERS,
) -> EngineMemory:
    """Return the memory of the engine with these settings.

    Raises:
        ModelError: the folder has no config of a suitable model.
    """
    dtype = compute_dtype(engine.dtype, use.device)
    module = simulated_model(model, use.head, dtype, trained=use.update is not None)
    largest_weight = max(p.numel() for p in module.parameters())
    weights: dict[torch.dtype | None, int] = {}
    for name, p in module.named_parameters():
        if not is_adapter(name):
            kept = torch.promote_types(dtype, torch.float32) if p.requires_grad else dtype
            at = None if name.endswith(f"{BASE}.weight") else kept
            weights[at] = weights.get(at, 0) + p.numel()
    if engine.tensor_parallel_size > 1:
        divide_layers(module, ModelRanks.simulated(engine), None)
        min_unit_parameters = 0
    units = _Units(module, engine, use, min_unit_parameters)
    update, evaluate = (
        count_pass(module, model, engine, use, backward=backward) for backward in (True, False)
    )
    held, host = units.held(), 0
    adds: dict[str, Bytes] = {}
    if evaluate is not None:
        gathered = units.gathered(engine.reshard_after_forward)
        adds["evaluate"] = {"gathered parameters": gathered, **units.forward(evaluate)}
    if update is not None:
        adds |= {"backward": units.backward(update), "step": units.step()}
    whole = whole_load_reason(model, use.head, update is not None)
    if units.hosted:
        gradients = units.shard_bytes(units.trained)
        host = held["parameters"] + held.get("optimizer states", 0) + (gradients if update else 0)
        held = {}
    return EngineMemory(
        held=held | {"buffers of the model": sum(b.nbytes for b in module.buffers())},
        adds=adds,
        host=host,
        missing=next((found.problem for found in (update, evaluate) if found), ""),
        loading=4 * sum(weights.values()) if whole else 0,
        weights=weights,
        largest_weight=largest_weight,
    )


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


class _Units:
    """The FSDP units of a model: the parameters of the root, and those of each layer unit.

    `tensor` ranks have divided the layers. Then `shards` ranks share one copy of a layer's part,
    and `tensor` times as many share the root.
    """

    def __init__(
        self, module: PreTrainedModel, engine: EngineConfig, use: TrainingUse, smallest: int
    ) -> None:
        layers = [list(layer.parameters()) for layer in sharding.decoder_layers(module)]
        self.layers = [layer for layer in layers if _elements(layer) >= smallest]
        in_layers = {id(p) for p in chain(*self.layers)}
        self.all = list(module.parameters())
        self.root = [p for p in self.all if id(p) not in in_layers]
        self.on_cpu = use.device_type == "cpu"
        self.hosted = engine.offload_policy and not self.on_cpu
        self.dtype = compute_dtype(engine.dtype, use.device)
        self.reduce_dtype = compute_dtype(engine.reduce_dtype, use.device)
        self.kept_dtype = torch.promote_types(self.dtype, torch.float32)
        self.tensor = engine.tensor_parallel_size
        ranks = use.ranks // self.tensor
        self.shards = ranks if engine.fsdp_size == -1 else engine.fsdp_size
        self.frees = engine.reshard_after_forward
        self.early = engine.reduce_each_micro_batch
        self.trained = [p for p in self.all if p.requires_grad] if use.update else []
        self._trained_ids = {id(p) for p in self.trained}
        rules = rule_of_each(module, use.optim.name) if use.update else {}
        named = dict(module.named_parameters())
        self.updated = [
            _Updated(self._shape(named[name], in_layers), rule) for name, rule in rules.items()
        ]

    def _shape(self, p: nn.Parameter, in_layers: set[int]) -> tuple[int, ...]:
        # Rows of the root are divided twice: ⌈⌈n / t⌉ / s⌉ = ⌈n / (t · s)⌉.
        parts = 1 if id(p) in in_layers else self.tensor
        return (math.ceil(len(p) / parts), *p.shape[1:]) if p.dim() else ()

    def learning(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the trained ones of the parameters."""
        return [p for p in parameters if id(p) in self._trained_ids]

    def shard_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return the bytes of the shards of the rank with most rows: 3 of 5 rows on 2 ranks."""
        in_root = {id(p) for p in self.root}
        found = 0
        for p in parameters:
            shards = self.shards * (self.tensor if id(p) in in_root else 1)
            dtype = self.kept_dtype if id(p) in self._trained_ids else self.dtype
            rows = len(p) if p.dim() else 1
            found += dtype.itemsize * math.ceil(rows / shards) * (p.numel() // rows)
        return found

    def held(self) -> dict[str, int]:
        """Return the shards, and the optimizer's state of the rank with the largest shards."""
        states = [
            state_bytes(p.rule, p.shape, p.rows(self.shards), self.kept_dtype) for p in self.updated
        ]
        found = {"parameters": self.shard_bytes(self.all)}
        return found | ({"optimizer states": sum(states)} if self.trained else {})

    def step(self) -> Bytes:
        """Return what the update of the parameters needs: gradient shards and its buffers."""
        # AdamW is fused: it allocates nothing.
        muon = [p for p in self.updated if p.rule == "muon"]
        direction = self.kept_dtype if self.on_cpu else torch.bfloat16
        matrices = sorted((p for p in muon if len(p.shape) == 2), key=lambda p: -p.elements(1))
        found = [0, self._round_bytes(matrices[: self.shards], direction)]
        for p in (p for p in muon if len(p.shape) == 3):  # experts
            shape = (p.rows(self.shards), *p.shape[1:])
            own = p.elements(self.shards) * direction.itemsize
            found.append(own + _newton_schulz_bytes(shape, direction))
        found += [
            p.elements(self.shards) * EIGHT_BIT_STEP_BYTES
            for p in self.updated
            if p.rule == "adamw_8bit" and self.on_cpu
        ]
        return {"gradients": self._gradient_shards, "buffers": max(found)}

    def _round_bytes(self, matrices: Sequence[_Updated], dtype: torch.dtype) -> int:
        """Return the bytes of the largest round of Muon: one matrix for each rank."""
        if not matrices:
            return 0
        own = sum(matrix.elements(self.shards) for matrix in matrices) * dtype.itemsize
        whole = matrices[0].elements(1) * dtype.itemsize
        # The shards to be sent are joined, and a whole matrix is received.
        exchange = own + whole if self.shards > 1 else 0
        return own + exchange + _newton_schulz_bytes(matrices[0].shape, dtype)

    @property
    def _gradient_shards(self) -> int:
        """The bytes of reduced gradients on the device."""
        return 0 if self.hosted else self.shard_bytes(self.trained)

    def gathered(self, frees: bool) -> int:
        """Return the bytes of gathered parameters. `frees`: a layer's are freed after its pass."""
        layers = [self._whole(layer) for layer in self.layers]
        if frees and layers:
            # An accelerator gathers the next layer while it computes one.
            ahead = 1 if self.shards > 1 and not self.on_cpu else 0
            layers = [max(layers)] * min(len(layers), 1 + ahead)
        return self._whole(self.root) + sum(layers)

    def _whole(self, parameters: Iterable[nn.Parameter]) -> int:
        return _elements(parameters) * self.dtype.itemsize

    def forward(self, found: PassMemory) -> Bytes:
        """Return what a forward pass adds to the gathered parameters."""
        # FSDP frees the buffer of a gather with the next gather, or at the end of the model's pass.
        buffer = self._gather_buffer(self.layers or [self.root])
        return largest(
            {"activations": found.forward}, {"activations": found.inside, "buffers": buffer}
        )

    def _gather_buffer(self, units: Sequence[Sequence[nn.Parameter]]) -> int:
        """Return the bytes into which the largest unit is gathered, before it is copied out."""
        gathered = [u for u in units if self.shards * (self.tensor if u is self.root else 1) > 1]
        # Shards in host memory are copied to the device in their own dtype first.
        copied = max(map(self.shard_bytes, units)) if self.hosted else 0
        return max(map(self._whole, gathered), default=0) + copied

    def _reduction(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return what the reduction of their gradients allocates, its input included."""
        flat = _elements(parameters) * self.reduce_dtype.itemsize
        if self.shards == 1:
            return 3 * flat  # the input, the input divided by a factor, the output
        return flat + flat // self.shards + (flat if self.on_cpu else 0)  # gloo copies its input

    def backward(self, found: PassMemory) -> Bytes:
        """Return the largest moment of the forward and the backward pass."""
        whole = _elements(self.trained) * self.reduce_dtype.itemsize
        early = self.early
        if early is None:
            early = self._whole(self.all) + whole > sharding.MAX_UNSHARDED_BYTES
        # The last micro-batch always reduces, so a single one does.
        reduces = early or not found.several
        if self.layers:
            return largest(*self._layered(found, whole, reduces))
        return largest(*self._one_unit(found, whole, reduces))

    def _one_unit(self, found: PassMemory, whole: int, reduces: bool) -> list[Bytes]:
        """Return the moments of a step if the root is the only unit."""
        gathered = self.gathered(False)
        # Gradients from earlier micro-batches: shards, or whole ones in the dtype of the reduction.
        earlier = 0 if not found.several else self._gradient_shards if reduces else whole
        # A gradient is added in place to an earlier one of its own dtype.
        in_place = not reduces and self.dtype == self.reduce_dtype
        new = 0 if in_place else found.with_gradients - found.activations
        # The buffer is filled from whole gradients, which are then freed. Gathered parameters have
        # been freed before.
        filled = whole if found.several and not reduces else self._whole(self.trained)
        kept = earlier if reduces or not found.several else 0
        return [
            _moment(gathered, earlier if reduces else 0, **self.forward(found)),
            _moment(gathered, earlier + new, found.activations),
            _moment(0, kept + filled, buffers=whole),
            _moment(0, kept, buffers=self._reduction(self.trained)),
        ]

    def _layered(self, found: PassMemory, whole: int, reduces: bool) -> list[Bytes]:
        """Return the moments of a step if layers are units: reduced while others go backward."""
        gathered = self.gathered(self.frees and reduces)
        layer = max(map(self.learning, self.layers), key=_elements)
        in_root = self.learning(self.root)
        new = self._whole(in_root) + self._whole(layer)
        complete = self._gradient_shards if reduces else whole
        if found.several and not reduces and self.dtype == self.reduce_dtype:
            new = 0  # a gradient is added in place to an earlier one of its own dtype
        earlier = complete if found.several else 0
        reduction, root_reduction = self._reduction(layer), self._reduction(in_root)
        # The last layer is reduced first, when its activations and the logits are gone.
        begun = min(new, found.with_gradients - found.activations)
        left = (found.saved - found.logits) * (len(self.layers) - 1) // len(self.layers)
        return [
            _moment(gathered, earlier if reduces else 0, **self.forward(found)),
            _moment(gathered, earlier + begun, found.activations),
            _moment(gathered, earlier + new, max(left, 0), reduction),
            _moment(gathered, complete + new, found.activations - found.saved),
            _moment(gathered, complete + new, buffers=reduction),
            _moment(gathered, complete, buffers=root_reduction),
        ]


def _moment(gathered: int, gradients: int, activations: int = 0, buffers: int = 0) -> Bytes:
    return {
        "gathered parameters": gathered,
        "gradients": gradients,
        "activations": activations,
        "buffers": buffers,
    }


@dataclass(frozen=True)
class _Updated:
    """A trained parameter: its shape, with all of its rows, and the rule that updates it."""

    shape: tuple[int, ...]
    rule: OptimizerName

    def rows(self, shards: int) -> int:
        """Return the rows of the largest shard."""
        return math.ceil(self.shape[0] / shards) if self.shape else 1

    def elements(self, shards: int) -> int:
        """Return the elements of the largest shard."""
        return self.rows(shards) * math.prod(self.shape[1:])


def _newton_schulz_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return what the iteration allocates, counted on the meta device."""
    counter = AllocationCounter()
    matrix = torch.empty(*shape, dtype=dtype, device=META)
    with counter:
        newton_schulz(matrix)
    return counter.peak
