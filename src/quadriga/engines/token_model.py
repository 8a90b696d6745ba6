"""One forward pass of a micro-batch: from rows of tokens to one number for each response token.

The output layer of a sharded model has its full weight only while the model runs, so the
log-probabilities must be computed at that moment. With the *fused head*, the layer computes a
function of the hidden states (`replaced_forward`), and the model returns its result as the logits.

The image encoder computes in every pass, with an empty image if no row has one. Its layers are FSDP
units, whose parameters all ranks gather together: a rank without images that left them out would
leave the others waiting.

Shapes: B rows, P prompt columns, R response columns, S = P + R, L tokens of the longest row, K
targets (the response tokens with `response_mask` 1), D hidden size, V vocabulary entries.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from quadriga.algorithms.full_kl import kl_full
from quadriga.config.schema import AttentionName
from quadriga.engines.attention import kernels
from quadriga.engines.attention.choice import kernels_of
from quadriga.engines.base import ENTROPY, FULL_KL, LOG_PROBS, VALUES, Batch, HeadKind, Outputs
from quadriga.engines.micro_batches import REQUIRED_FIELDS, dummy_batch, sliced_rows
from quadriga.engines.sequence_cost import sequence_cost
from quadriga.engines.sharding import class_name
from quadriga.errors import ConfigError
from quadriga.models.architectures import takes_images
from quadriga.models.cpu_linear import CpuLinear
from quadriga.models.images import GRIDS, PIXELS, MultiModalRows, image_tokens_of
from quadriga.models.log_probs import linear_full_kl, linear_log_probs, log_probs_and_entropy
from quadriga.models.routes import Routers
from quadriga.parallel.device import on_device
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.parallel.packing import left_align
from quadriga.protocol import fields

HeadFn = Callable[[Tensor, Tensor], Tensor]
"""(hidden states that the output layer receives, its weight [V, D]) -> the model's "logits"."""

TargetStates = tuple[Tensor, Tensor | None]
"""Of which outputs are computed: the logits [K, V] of the targets and None; or, with the fused
head, their hidden states [K, D] and the weight [V, D] of the output layer."""

MIN_FUSED_LOGITS = 2**26
"""Logits of a micro-batch (tokens × vocabulary) from which on the fused head is used. It costs a
fourth matrix product and saves this many logits, 256 MB in float32."""


@contextmanager
def replaced_forward(layer: nn.Linear, function: HeadFn) -> Iterator[None]:
    """Within the block, the output layer computes `function`."""
    before = layer.forward

    def forward(hidden: Tensor) -> Tensor:
        return function(hidden, layer.weight)

    # Only the instance's `forward` is replaced: hooks and the weight's name do not change.
    layer.forward = forward  # type: ignore[method-assign, assignment]  # on purpose
    try:
        yield
    finally:
        layer.forward = before  # type: ignore[method-assign]  # on purpose


def fusable_layer(model: PreTrainedModel, run: Callable[[], Tensor]) -> nn.Linear | str:
    """Return the model's output layer if its logits are hidden @ weightᵀ, else the reason why not.

    `run` returns the model's logits for any input. They must be the very tensor that the output
    layer returned. This test finds every model that scales, caps or slices its logits afterwards,
    without a list of models or settings.
    """
    layer: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # none
    name = class_name(model)
    if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, CpuLinear):
        return f"the output layer of {name} is {type(layer).__name__}, not Linear"
    if layer.bias is not None:
        return f"the output layer of {name} has a bias"
    returned: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: returned.append(output))
    with torch.no_grad():
        logits = run()
    hook.remove()
    if len(returned) != 1 or returned[0] is not logits:
        return f"{name} changes its logits after the output layer"
    return layer


# Two rows of text, L = 3, and the row of the empty image, which consists of one token (i):
#
#   input_ids     11 12 21        position_ids   0 1 2     of each dimension
#                 13 14  0                       0 1 2
#                  i  0  0                       0 0 0
#
# No target is in the last row, so it changes neither an output nor a gradient.


def image_arguments(
    config: PreTrainedConfig,
    input_ids: Tensor,
    attention_mask: Tensor,
    images: MultiModalRows | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the arguments of the model's `forward`, on `device`.

    Args:
        input_ids: [B, L], rows that begin in column 0.
        attention_mask: [B, S], the tokens among the columns of the batch.
        images: of the rows, with as many tokens as the rows have; None: they have none.
    """
    tokens = image_tokens_of(config)
    assert tokens is not None
    positions = torch.arange(input_ids.shape[1]).expand(3, *input_ids.shape)
    joined: dict[str, Tensor] = {}
    if images is not None:
        positions, joined = _left_aligned(images.position_ids, attention_mask), images.joined()
    # On the meta device, where memory is planned, the encoder cannot compute: it reads numbers.
    if not joined and device.type != "meta":
        joined = _empty_image(config, tokens.merge_size)
        row = torch.zeros_like(input_ids[:1])
        row[0, 0] = tokens.image
        input_ids = torch.cat([input_ids, row])
        positions = torch.cat([positions, torch.zeros_like(positions[:, :1])], dim=1)
    arguments = {"input_ids": input_ids, "position_ids": positions, **joined}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in arguments.items()}


def _left_aligned(positions: Tensor, attention_mask: Tensor) -> Tensor:
    """Move positions [B, 3, S] to where `parallel.aligned_rows` moves the tokens: [3, B, L]."""
    valid = attention_mask.bool()
    longest = max(int(valid.sum(1).max()), 1) if len(valid) else 1
    row, column = valid.nonzero(as_tuple=True)
    place = (valid.long().cumsum(1) - 1)[row, column]
    aligned = positions.new_zeros(3, len(valid), longest)
    aligned[:, row, place] = positions[row, :, column].T
    return aligned


def _empty_image(config: PreTrainedConfig, merge_size: int) -> dict[str, Tensor]:
    """Return an image of one token, all of whose numbers are 0."""
    vision = config.vision_config
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    numbers = channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        PIXELS: torch.zeros(merge_size**2, numbers),
        GRIDS: torch.tensor([[1, merge_size, merge_size]]),
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the block, `model` computes what its base model computes."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # PEFT's own switch also changes `requires_grad`, which FSDP has read once for all steps.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def identity(outputs: Tensor) -> Tensor:
    """Return the outputs of a rank that has all tokens."""
    return outputs


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch in the form that the model takes.

    Attributes:
        arguments: keyword arguments of the model's `forward`.
        labels: [K] int64, the token ids of the targets. If ranks split the tokens, K counts the
            targets of this rank.
        select: maps what the output layer receives or returns to its entries for the targets,
            [K, …].
        unpack: maps [K] to [B, R], with 0 where there is no target.
        join: maps outputs [K, C] to those of the targets of all ranks.
        routes: [tokens, layers, K], the experts that the tokens of this rank must have.
    """

    arguments: dict[str, Tensor | kernels.AttentionRows]
    labels: Tensor
    select: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor] = identity
    routes: Tensor | None = None


class TokenModel:
    """A Hugging Face model as a function of micro-batches.

    If the model supports it, rows are packed: no padding, shared prompts are computed once, and the
    head is applied only where a response token is predicted. Otherwise rows stay padded, which
    gives the same numbers with more work.

    Args:
        packed: None: pack if the model supports it.
        fused: whether to use the fused head. None: if the model supports it and a micro-batch of
            `micro_batch_tokens` has at least `MIN_FUSED_LOGITS` logits.
        attention: the kernel of packed rows (`engines/attention/choice.py`).
        dtype: in which attention will be computed.
        device_type: for a model on the meta device, the type of device that it stands for.
        probe: False: the model has no weights yet, and `probe` is called when it has.
        ranks: the ranks that compute a micro-batch together; None: this rank alone.

    Raises:
        ConfigError: `fused` is True, or `attention` names a kernel, and the model does not support
            it.
        ModelError: `packed` is True and the model does not support it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: HeadKind,
        device: torch.device,
        *,
        packed: bool | None = None,
        fused: bool | None = False,
        micro_batch_tokens: int = 0,
        attention: AttentionName = "auto",
        dtype: torch.dtype = torch.float32,
        device_type: str | None = None,
        probe: bool = True,
        ranks: ModelRanks | None = None,
    ) -> None:
        self.model = model
        self.head = head
        self.routers = Routers(model)
        self.device = device
        self.device_type = device.type if device_type is None else device_type
        self.packed = kernels.supports_packing(model) if packed is None else packed
        self.cost = sequence_cost(model.config, head, self.device_type, attention)
        self.ranks = ModelRanks() if ranks is None else ranks
        if self.packed:
            kernels.use_packed_attention(model)
        self.kernel_of: kernels.KernelOf = kernels.sdpa_only
        self._fused_layer: nn.Linear | None = None
        self.adapted = True  # whether adapters are on
        self._attention, self._dtype = attention, dtype
        self._fused, self._micro_batch_tokens = fused, micro_batch_tokens
        if probe:
            self.probe()

    def probe(self) -> None:
        """Choose the kernels and the head, by what the model does with an example.

        All ranks of a sharded model must call it. Raises what the class raises.
        """
        self.kernel_of = self._choose_attention()
        if self.head != "lm" or self._fused is False:
            return
        vocabulary: int = self.model.config.get_text_config().vocab_size
        if self._fused is None and self._micro_batch_tokens * vocabulary < MIN_FUSED_LOGITS:
            return
        layer = fusable_layer(self.model, lambda: self._run(self._model_inputs(dummy_batch())))
        if not isinstance(layer, str):
            self._fused_layer = layer
        elif self._fused:
            raise ConfigError(f"engine.fused_head=true: {layer}; set it to null or false")

    @property
    def fused(self) -> bool:
        """Whether log-probabilities are computed from hidden states, without all the logits."""
        return self._fused_layer is not None

    def __call__(
        self,
        rows: Batch,
        *,
        temperature: float,
        entropy: bool,
        reference: TokenModel | None = None,
        images: MultiModalRows | None = None,
    ) -> Outputs:
        """Compute the outputs [B, R] of `rows` (on any device) on the model's device.

        With a `reference`, they contain `full_kl`: KL(this ‖ reference) over the vocabulary.
        """
        inputs = self._model_inputs(rows, images)
        if self.head != "lm":
            values = inputs.join(inputs.select(self._run(inputs)).float())
            return {VALUES: inputs.unpack(values[:, 0])}
        fused = self.fused and (reference is None or reference.fused)
        ref = None if reference is None else reference.targets(rows, images, fused=fused)
        # The replaced output layer returns one column for each output, so the model's "logits" are
        # [K, number of outputs] instead of [K, V].
        compute = partial(_columns, inputs.labels, temperature, entropy, ref)
        columns = inputs.join(self._apply(compute, inputs, fused=fused))
        names = [LOG_PROBS, *[ENTROPY] * entropy, *[FULL_KL] * (reference is not None)]
        return {name: inputs.unpack(columns[:, i]) for i, name in enumerate(names)}

    def targets(
        self, rows: Batch, images: MultiModalRows | None = None, *, fused: bool
    ) -> TargetStates:
        """Return the targets of `rows`, without gradient.

        The weight is valid until the model's weights are sharded again.
        """
        weights: list[Tensor | None] = []

        def keep(x: Tensor, weight: Tensor | None) -> Tensor:
            weights.append(None if weight is None else weight.detach())
            return x

        rows = {name: rows[name] for name in REQUIRED_FIELDS}  # its own experts
        with torch.no_grad():
            return self._apply(keep, self._model_inputs(rows, images), fused=fused), weights[0]

    def _apply(
        self,
        function: Callable[[Tensor, Tensor | None], Tensor],
        inputs: ModelInputs,
        *,
        fused: bool,
    ) -> Tensor:
        """Return a function of the targets. With the fused head, it is computed in the model."""
        if not fused:
            return function(inputs.select(self._run(inputs)), None)
        assert self._fused_layer is not None
        layer = self._fused_layer
        with replaced_forward(layer, lambda x, weight: function(inputs.select(x), weight)):
            return self._run(inputs)

    def without_adapters(self) -> TokenModel:
        """Return the base model as a function: the same weights, with adapters off."""
        base = copy.copy(self)
        base.adapted = False
        return base

    def _run(self, inputs: ModelInputs) -> Tensor:
        with nullcontext() if self.adapted else adapters_off(self.model):
            self.routers.follow(inputs.routes)
            logits: Tensor = self.model(**inputs.arguments, use_cache=False).logits
            if inputs.routes is not None:
                self.routers.chosen()  # raises unless each layer has taken them
            return logits

    def _choose_attention(self) -> kernels.KernelOf:
        """Return the kernel of each call of attention that the model makes."""
        if not self.packed and self._attention not in ("auto", "sdpa"):
            raise ConfigError(
                f"engine.attention={self._attention} needs packed rows, and "
                f"{class_name(self.model)} is computed with padded rows; set it to auto"
            )
        if not self.packed:
            return kernels.sdpa_only
        return kernels_of(self._attention_calls, self._attention, self.device, self.device_type)

    def _attention_calls(self) -> set[kernels.AttentionCall]:
        """Return the calls of attention in one forward pass, as they will be in `dtype`."""
        calls: set[kernels.AttentionCall] = set()

        def note(call: kernels.AttentionCall) -> kernels.Kernel:
            calls.add(replace(call, dtype=self._dtype))
            return "sdpa"

        before, self.kernel_of = self.kernel_of, note
        try:
            with torch.no_grad():
                self._run(self._model_inputs(dummy_batch()))
        finally:
            self.kernel_of = before
        return calls

    def _model_inputs(self, rows: Batch, images: MultiModalRows | None = None) -> ModelInputs:
        return self._packed_inputs(rows) if self.packed else self._padded_inputs(rows, images)

    def _packed_inputs(self, rows: Batch) -> ModelInputs:
        packed, own = sliced_rows(rows, self.ranks.all.size, self.ranks, self.device)
        arguments: dict[str, Tensor | kernels.AttentionRows] = {
            "input_ids": own.input_ids,
            "position_ids": own.position_ids,
            # With a mask [1, N], the model builds masks from token indices alone. Without one, it
            # would look for packed rows in the position ids by rules of its own.
            "attention_mask": torch.ones_like(own.input_ids),
            "attention_rows": kernels.AttentionRows(
                packed.rows,
                self.device,
                self.kernel_of,
                split=self.device_type == "cpu",
                ranks=self.ranks,
            ),
        }
        if self.head == "lm":
            # A causal model can apply its output layer to selected tokens only.
            arguments["logits_to_keep"] = own.predictors
        return ModelInputs(
            arguments, own.labels, lambda x: x[0] if self.head == "lm" else x[0, own.predictors],
            packed.targets.unpack, own.join, own.routes,
        )  # fmt: skip

    def _padded_inputs(self, rows: Batch, images: MultiModalRows | None) -> ModelInputs:
        config, mask, routes = self.model.config, rows[fields.ATTENTION_MASK], None
        tokens = [rows[name] for name in REQUIRED_FIELDS]
        ids, targets = left_align(*tokens)
        if fields.ROUTED_EXPERTS in rows:
            source, _ = left_align(torch.arange(mask.numel()).view_as(mask), *tokens[1:])
            routes = rows[fields.ROUTED_EXPERTS].flatten(0, 1)[source.flatten()]
        arguments: dict[str, Tensor | kernels.AttentionRows] = {
            "input_ids": ids.to(self.device, non_blocking=True)
        }
        if takes_images(config):
            arguments.update(image_arguments(config, ids, mask, images, self.device))
        found = on_device(targets, self.device)
        at = found.row, found.position - 1
        return ModelInputs(arguments, found.labels, lambda x: x[at], found.unpack, routes=routes)


def _columns(
    labels_K: Tensor,
    temperature: float,
    entropy: bool,
    reference: TargetStates | None,
    x: Tensor,
    weight_VD: Tensor | None,
) -> Tensor:
    """Compute the outputs [K, columns] of targets; the dtype is at least float32.

    Args:
        x, weight_VD: see `TargetStates`. With a weight there is no [K, V] tensor.
        reference: the targets of the reference model, in the same form.
    """
    if weight_VD is None:
        log_prob, ent = log_probs_and_entropy(x, labels_K, temperature, entropy=entropy)
    else:
        log_prob, ent = linear_log_probs(x, weight_VD, labels_K, temperature, entropy=entropy)
    columns = [log_prob, ent] if entropy else [log_prob]
    if reference is not None:
        ref, ref_weight = reference
        if weight_VD is None or ref_weight is None:
            columns.append(kl_full(x, ref, temperature))
        else:
            columns.append(linear_full_kl(x, weight_VD, ref, ref_weight, temperature))
    return torch.stack(columns, -1)
