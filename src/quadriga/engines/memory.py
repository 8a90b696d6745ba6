"""The memory of a training engine on one rank, known before a weight is loaded.

States are arithmetic. The activations of one micro-batch are counted on the meta device by the code
that trains. `fsdp_memory` and `megatron.memory` have one function `(model, engine, use) ->
EngineMemory`.

`FSDPEngine` holds parameter shards all the time. In an optimizer step it also holds, at most:

    forward     activations + gathered parameters + the buffer of a gather
    backward    activations + gathered parameters + gradients
    reduction   gathered parameters + gradients + the buffers of a reduction
    step        gradient shards + what the optimizer allocates

The largest of the first three is the peak of "backward". `sharding.py` says what a unit is, and
`FSDPEngine` when gradients are reduced. With `engine.offload_policy`, shards of parameters and
gradients and the optimizer's state are in host memory, which on a CPU is the same memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import sharding
from quadriga.engines.base import EntropyUse, HeadKind
from quadriga.engines.loading import simulated_model, whole_load_reason
from quadriga.engines.micro_batches import plan_micro_batches, select_rows
from quadriga.engines.optimizers import MOMENTS
from quadriga.engines.tensor_parallel import divide_layers
from quadriga.engines.token_model import TokenModel
from quadriga.models import memory
from quadriga.models.adapters import BASE, is_adapter
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.protocol import fields

_MANY = 16  # micro-batches


@dataclass(frozen=True)
class Rows:
    """The rows of one rank in one call. All have full length.

    Attributes:
        count: rows.
        prompt, response: tokens of each.
        samples: rows that share a prompt and are neighbours.
        micro_batch: most rows of a micro-batch, within the engine's budget of tokens. None: any
            number.
        entropy: what is computed of the entropies; "gradient" in an update only.
    """

    count: int
    prompt: int
    response: int
    samples: int = 1
    micro_batch: int | None = None
    entropy: EntropyUse = "unused"

    def batch(self) -> dict[str, Tensor]:
        """Return the fields that a forward pass needs, with prompt + response columns.

        Different prompts begin with different numbers, which can be above the vocabulary.
        """
        ids = torch.zeros(self.count, self.prompt + self.response, dtype=torch.int64)
        ids[:, 0] = torch.arange(self.count) // self.samples
        return {
            fields.INPUT_IDS: ids,
            fields.ATTENTION_MASK: torch.ones_like(ids),
            fields.RESPONSE_MASK: torch.ones_like(ids[:, self.prompt :]),
        }

    def for_micro_batches(self, tokens: int | None) -> Rows:
        """Return fewer rows if these are certainly many micro-batches of at most `tokens`."""
        # Micro-batches have about equal costs. 18 rows, at most 16 in a micro-batch, are 9 and 9,
        # and 64 rows are 16 in each. So few rows show the size only if they are many micro-batches.
        # A shared prompt is computed once, so a row adds at least its response.
        by_tokens = self.count if tokens is None else tokens // self.response + self.samples + 1
        most = min(by_tokens, self.micro_batch or by_tokens)
        return replace(self, count=min(self.count, _MANY * most))


@dataclass(frozen=True)
class TrainingUse:
    """How a run uses a training engine.

    Attributes:
        ranks: ranks of the worker group.
        device_type: "cpu", or the type of an accelerator.
        update: the rows of one rank in an optimizer step. None: the engine is not trained.
        evaluate: the rows of one rank in a pass without gradients. None: there is none.
    """

    head: HeadKind
    ranks: int
    device_type: str
    update: Rows | None
    evaluate: Rows | None

    @property
    def device(self) -> torch.device:
        """A device on which `compute_dtype` chooses the same dtypes."""
        return torch.device("cpu") if self.device_type == "cpu" else memory.META


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one micro-batch on one rank, without parameters.

    Attributes:
        rows, tokens: of the micro-batch; a shared prompt counts once.
        several: whether a call has more than one micro-batch.
        forward: most bytes in the forward pass.
        inside: most bytes until the model has returned, before its outputs are computed.
        saved: bytes after the forward pass, which the backward pass needs.
        peak: most bytes in both passes.
        problem: why the other numbers are 0; "" if they are counted.
    """

    rows: int
    tokens: int = 0
    several: bool = True
    forward: int = 0
    inside: int = 0
    saved: int = 0
    peak: int = 0
    problem: str = ""


def count_pass(
    module: PreTrainedModel,
    engine: EngineConfig,
    use: TrainingUse,
    rows: Rows,
    *,
    backward: bool,
    gradients_exist: bool = True,
    stages: int = 1,
) -> PassMemory:
    """Return the memory of the update, or of the pass without gradients.

    Args:
        module: a model on the meta device.
        gradients_exist: gradients of parameters are added to earlier ones, and not counted.
        stages: least micro-batches, if there are as many rows.
    """
    if backward and gradients_exist:
        for parameter in _trained(module.parameters()):
            parameter.grad = torch.empty_like(parameter)
    entropies = rows.entropy == "gradient"
    with memory.kernels_of(use.device_type, entropies_have_gradients=entropies):
        found = memory.counted(lambda: pass_memory(module, engine, use, rows, backward, stages))
    return PassMemory(rows.count, problem=found) if isinstance(found, str) else found


def pass_memory(
    module: PreTrainedModel,
    engine: EngineConfig,
    use: TrainingUse,
    rows: Rows,
    backward: bool,
    stages: int,
) -> PassMemory:
    """Compute the largest micro-batch of `rows` with a model on the meta device."""
    model = TokenModel(
        module, use.head, memory.META, fused=engine.fused_head,
        micro_batch_tokens=engine.max_tokens_per_micro_batch, attention=engine.attention,
        dtype=next(module.parameters()).dtype, device_type=use.device_type,
        ranks=ModelRanks.simulated(engine),
    )  # fmt: skip
    tokens = engine.micro_batch_tokens if engine.use_dynamic_bsz else None
    batch = rows.for_micro_batches(tokens).batch()
    micro_batches = plan_micro_batches(
        batch, size=rows.micro_batch, max_tokens=tokens, share_prompts=model.packed, stages=stages
    )
    micro = select_rows(batch, micro_batches[0], torch.device("cpu"))  # the largest one
    counter, inside = memory.AllocationCounter(), []
    hook = module.register_forward_hook(lambda *_: inside.append(counter.peak))
    with counter, torch.set_grad_enabled(backward):
        outputs = model(micro, temperature=1.0, entropy=rows.entropy != "unused")
        forward, saved = counter.peak, counter.live
        if backward:
            memory.run_backward(torch.stack([v.sum() for v in outputs.values()]).sum())
        del outputs
    hook.remove()
    count = len(micro[fields.INPUT_IDS])
    prompts = math.ceil(count / rows.samples) if model.packed else count
    tokens = prompts * rows.prompt + count * rows.response
    several = len(micro_batches) > 1
    return PassMemory(count, tokens, several, forward, inside[0], saved, counter.peak)


# FSDP.


def fsdp_memory(model: ModelConfig, engine: EngineConfig, use: TrainingUse) -> memory.EngineMemory:
    """Return the memory of `FSDPEngine` with these settings.

    Raises:
        ModelError: the folder has no config of a suitable model.
    """
    dtype = compute_dtype(engine.dtype, use.device)
    module = simulated_model(model, use.head, dtype, trained=use.update is not None)
    largest_weight = max(p.numel() for p in module.parameters())
    weights: Counter[torch.dtype | None] = Counter()
    for name, p in module.named_parameters():
        if not is_adapter(name):
            kept = torch.promote_types(dtype, torch.float32) if p.requires_grad else dtype
            weights[None if name.endswith(f"{BASE}.weight") else kept] += p.numel()
    if engine.tensor_parallel_size > 1:
        divide_layers(module, ModelRanks.simulated(engine), None)
    units = _Units(module, engine, use)
    held, host, missing = units.held(), 0, ""
    adds: dict[str, memory.Bytes] = {}
    rows: dict[str, int] = {}
    if use.update is not None:
        found = count_pass(
            module, engine, use, use.update, backward=True, gradients_exist=bool(units.layers)
        )
        adds, missing = {"backward": units.backward(found), "step": units.step()}, found.problem
        rows["backward"] = found.rows
    if use.evaluate is not None:
        found = count_pass(module, engine, use, use.evaluate, backward=False)
        gathered = units.gathered(engine.reshard_after_forward)
        adds["evaluate"] = {"gathered parameters": gathered, "activations": units.forward(found)}
        missing, rows["evaluate"] = missing or found.problem, found.rows
    saved = units.shard_bytes(_trained(units.all)) + held.get("optimizer states", 0)
    if units.hosted:
        host, held = sum(held.values()) + units.shard_bytes(_trained(units.all)), {}
    whole = whole_load_reason(model, use.head, use.update is not None)
    return memory.EngineMemory(
        held=held | {"buffers of the model": sum(b.nbytes for b in module.buffers())}, adds=adds,
        host=host, missing=missing, rows=rows, loading=4 * sum(weights.values()) if whole else 0,
        weights=weights, largest_weight=largest_weight, saved=saved,
    )  # fmt: skip


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


class _Units:
    """The FSDP units of a model: the parameters of the root, and those of each layer unit.

    `tensor` ranks have divided the layers. Then `shards` ranks share one copy of a layer's part,
    and `tensor` times as many share the root.
    """

    def __init__(self, module: PreTrainedModel, engine: EngineConfig, use: TrainingUse) -> None:
        tensor = engine.tensor_parallel_size
        smallest = sharding.MIN_UNIT_PARAMETERS if tensor == 1 else 0
        layers = [list(layer.parameters()) for layer in sharding.decoder_layers(module)]
        self.layers = [layer for layer in layers if _elements(layer) >= smallest]
        in_layers = {id(p) for layer in self.layers for p in layer}
        self.all = list(module.parameters())
        self.root = [p for p in self.all if id(p) not in in_layers]
        self.engine = engine
        self.on_cpu = use.device_type == "cpu"
        self.hosted = engine.offload_policy and not self.on_cpu
        self.dtype = compute_dtype(engine.dtype, use.device)
        self.reduce_dtype = compute_dtype(engine.reduce_dtype, use.device)
        self.kept_dtype = torch.promote_types(self.dtype, torch.float32)
        self.early = sharding.reduces_each_micro_batch(
            module, engine.reduce_each_micro_batch, self.dtype, self.reduce_dtype
        )
        self.shards = use.ranks // tensor if engine.fsdp_size == -1 else engine.fsdp_size
        self.copies = {id(p): 1 if id(p) in in_layers else tensor for p in self.all}

    def _rows(self, p: nn.Parameter, ranks: int) -> tuple[int, ...]:
        """Return the shape of the largest of `ranks` parts: 3 of 5 rows on 2 ranks.

        Rows of the root are divided twice: ⌈⌈n / t⌉ / s⌉ = ⌈n / (t · s)⌉.
        """
        return (math.ceil(len(p) / (ranks * self.copies[id(p)])), *p.shape[1:]) if p.dim() else ()

    def shard_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the bytes of the shards of the rank with most rows."""
        return sum(
            math.prod(self._rows(p, self.shards))
            * (self.kept_dtype if p.requires_grad else self.dtype).itemsize
            for p in parameters
        )

    def held(self) -> dict[str, int]:
        """Return the shards, and the optimizer's state of the rank with the largest shards."""
        found = {"parameters": self.shard_bytes(self.all)}
        if trained := _trained(self.all):
            found["optimizer states"] = len(MOMENTS) * self.shard_bytes(trained)
        return found

    def step(self) -> memory.Bytes:
        """Return what the update of the parameters needs: gradient shards and its buffers."""
        return {"gradients": self._gradient_shards}  # AdamW is fused: it allocates nothing

    @property
    def _gradient_shards(self) -> int:
        """The bytes of reduced gradients on the device."""
        return 0 if self.hosted else self.shard_bytes(_trained(self.all))

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

    def forward(self, found: PassMemory) -> int:
        """Return what a forward pass adds to the gathered parameters."""
        # FSDP frees the buffer of a gather with the next gather, or at the end of the model's pass.
        units = self.layers or [self.root]
        divided = [u for u in units if self.shards * self.copies[id(u[0])] > 1]
        buffer = max(map(self._whole, divided), default=0)
        # Shards in host memory are copied to the device in their own dtype first.
        copied = max(map(self.shard_bytes, units)) if self.hosted else 0
        return max(found.forward, found.inside + buffer + copied)

    def _reduction(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return what the reduction of their gradients allocates, its input included."""
        flat = _elements(parameters) * self.reduce_dtype.itemsize
        if self.shards == 1:
            return 3 * flat  # the input, the input divided by a factor, the output
        return flat + flat // self.shards + (flat if self.on_cpu else 0)  # gloo copies its input

    def backward(self, found: PassMemory) -> memory.Bytes:
        """Return the largest moment of the forward and the backward pass."""
        whole = _elements(_trained(self.all)) * self.reduce_dtype.itemsize
        # The last micro-batch always reduces, so a single one does.
        reduces = self.early or not found.several
        gathered = self.gathered(self.engine.reshard_after_forward and reduces)
        # Gradients from earlier micro-batches: shards, or whole ones in the dtype of the reduction.
        complete = self._gradient_shards if reduces else whole
        earlier = complete if found.several else 0
        # New gradients: of the output layer, which the root keeps, and of the layer in computation.
        # A gradient is added in place to an earlier one of its own dtype.
        units = [_trained(unit) for unit in (self.root, *self.layers)]
        new = self._whole(max(units[1:] or units, key=_elements))
        new += max((self._whole([p]) for p in units[0] if self.layers), default=0)
        if not reduces and self.dtype == self.reduce_dtype:
            new = 0
        activations = max(self.forward(found), found.peak)
        reduction = max(map(self._reduction, units))
        moments = [
            (gathered, earlier + (new if self.layers else 0), activations, 0),
            # Without layer units the gathered parameters are freed before the reduction.
            (gathered if self.layers else 0, complete + new, 0, reduction),
        ]
        names = ("gathered parameters", "gradients", "activations", "buffers")
        return memory.largest(*(dict(zip(names, moment, strict=True)) for moment in moments))
