"""The training engine over FSDP2 (`fully_shard`), on one rank or many, on CPUs or accelerators."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quadriga.checkpoint.shards import Block, block_of, check_all_taken
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.base import (
    Batch,
    HeadKind,
    LossFn,
    Outputs,
    OwnWeights,
    Pass,
    State,
    TrainEngine,
    WeightPart,
)
from quadriga.engines.loading import export_model, prepared_model, saved_buffer_names, tied_names
from quadriga.engines.micro_batches import dummy_batch, select_rows
from quadriga.engines.optimizers import AdamW, ShardedOptimizer, local_shard, sharded_like
from quadriga.engines.sharding import (
    MIN_UNIT_PARAMETERS,
    forget_failed_pass,
    fsdp_units,
    reduces_each_micro_batch,
    shard_model,
)
from quadriga.engines.tensor_parallel import check_model_parallel, divide_layers
from quadriga.engines.token_model import TokenModel
from quadriga.errors import CheckpointError, ConfigError
from quadriga.models import adapters
from quadriga.models.images import MultiModalRows, check_images, copy_processor, image_tokens_of
from quadriga.models.loading import check_reward_model, model_errors, report_attention
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import SHARD, gather_over_ranks, on_all_ranks, rank
from quadriga.parallel.model_ranks import model_ranks, shard_meshes
from quadriga.protocol import fields

if TYPE_CHECKING:
    from quadriga.engines.sharding import ShardedModel

FROZEN = "frozen"
"""Key of the sums of the frozen weights in a checkpoint."""

ADAPTER_FOLDER = "adapter"
"""Folder of the adapter alone, in the export of a merged model."""

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


class FSDPEngine(TrainEngine):
    """A causal language model or a value model, sharded over the ranks. See `TrainEngine`.

    With an optimizer, parameters are float32 at least and only the computation is in
    `engine.dtype`. A frozen model has parameters in `engine.dtype`.

    Args:
        packed: whether to pack rows. None: if the model supports it.
        min_unit_parameters: layers with fewer parameters are not FSDP units of their own.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None = None,
        *,
        head: HeadKind = "lm",
        device: str | torch.device = "cpu",
        total_steps: int | None = None,
        packed: bool | None = None,
        min_unit_parameters: int = MIN_UNIT_PARAMETERS,
    ) -> None:
        self._packed, self._min_unit_parameters = packed, min_unit_parameters
        super().__init__(model, engine, optim, head=head, device=device, total_steps=total_steps)

    def _build(self, optim: OptimConfig | None) -> None:
        model, engine, device = self.model_config, self.config, self.device
        trained = optim is not None
        if model.lora.enabled and not trained:
            raise ConfigError(
                "model.lora is for a model that is trained, and this one is frozen; remove it, or "
                "set model.path to a merged model",
                key="model.lora",
            )
        if self.head == "score" and not trained:
            trusted = model.trust_remote_code
            on_all_ranks(lambda: check_reward_model(model.path, trust_remote_code=trusted))
        meshes, ranks = shard_meshes(engine, device), model_ranks(engine, device.type)
        self.reports = ranks.is_first
        dtype, reduced = (compute_dtype(d, device) for d in (engine.dtype, engine.reduce_dtype))
        module, weights, self._part = prepared_model(model, self.head, dtype, trained=trained)
        check_model_parallel(module.config, engine, "engine", packed=self._packed)
        # Before the model is sharded, which changes its class and its parameters.
        self._token_model = TokenModel(
            module, self.head, device, packed=self._packed, fused=engine.fused_head,
            micro_batch_tokens=engine.max_tokens_per_micro_batch, attention=engine.attention,
            dtype=dtype, probe=False, ranks=ranks,
        )  # fmt: skip
        self._report_attention(whole=weights is None)
        self._tied, self._saved_buffers = tied_names(module), saved_buffer_names(module)

        def shard() -> tuple[bool, ShardedModel]:
            with model_errors(Path(model.path), "model"):
                if meshes.tensor is not None:
                    divide_layers(module, ranks, meshes.tensor)
                early = reduces_each_micro_batch(
                    module, engine.reduce_each_micro_batch, dtype, reduced
                )
                return early, shard_model(
                    module, meshes, compute_dtype=dtype, reduce_dtype=reduced,
                    reshard_after_forward=engine.reshard_after_forward,
                    on_host=engine.offload_policy, min_unit_parameters=self._min_unit_parameters,
                )  # fmt: skip

        # FSDP moves a model that was loaded whole to the device unit by unit.
        self.reduces_each_micro_batch, self.module = on_all_ranks(shard)
        self._units = fsdp_units(self.module)
        if weights is not None:
            weights.read_into(self.module, device, on_host=engine.offload_policy)
        self._token_model.probe()
        self._end_pass(failed=False)  # the probe may have gathered parameters
        self.shares_prompts, self.cost = self._token_model.packed, self._token_model.cost
        if optim is not None:
            group = meshes.whole.get_group(SHARD)
            named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
            self.optimizer = ShardedOptimizer(
                [AdamW(named, optim)], optim, self.total_steps, shard_group=group, device=device
            )

    def _report_attention(self, *, whole: bool) -> None:
        """Warn if the engine computes another attention than `attn_implementation` asks for.

        `whole`: the model was loaded whole, and has said what it supports.
        """
        model, asked = self.model_config, self.model_config.attn_implementation
        if not self._token_model.packed:
            if not whole:
                report_attention(self._token_model.model, model.path, asked)
        elif asked != ModelConfig().attn_implementation and rank() == 0:
            _log.warning(
                "attn_implementation=%s of the model in %s has no effect in this engine, because "
                "it packs rows; engine.attention=%s chooses their kernel",
                asked, model.path, self.config.attention,
            )  # fmt: skip

    # Computation

    def _check_images(self, batch: Batch, images: MultiModalRows | None) -> None:
        tokens = image_tokens_of(self.module.config)
        check_images(batch[fields.INPUT_IDS], batch[fields.ATTENTION_MASK], images, tokens)

    def _outputs(self, of: Pass) -> Iterator[tuple[Tensor | None, Outputs]]:
        for rows in of.plan:
            yield rows, self._compute(of, rows)

    def _compute(
        self, of: Pass, rows: Tensor | None, reference: TokenModel | None = None
    ) -> Outputs:
        """Compute the outputs of one micro-batch."""
        chosen = dummy_batch() if rows is None else select_rows(of.batch, rows, _CPU)
        images = None if of.images is None or rows is None else of.images.select(rows)
        return self._token_model(
            chosen, temperature=of.temperature, entropy=of.entropy, reference=reference,
            images=images,
        )  # fmt: skip

    def _accumulate(
        self, of: Pass, loss_fn: LossFn, reference: TrainEngine | None
    ) -> Iterator[Mapping[str, Tensor | float]]:
        with _reference_model(reference) as ref, dropout_on(self.module, self._part.adapter):
            for index, rows in enumerate(of.plan):
                self._set_last_backward(index == len(of.plan) - 1)
                outputs = self._compute(of, rows, ref)
                if rows is None:
                    # The backward pass must run for FSDP's collectives, with a gradient of 0.
                    zero = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
                    torch.autograd.backward(zero)
                    continue
                loss, metrics = loss_fn(outputs, select_rows(of.batch, rows, self.device))
                torch.autograd.backward(loss)
                yield {"loss": loss.detach(), **metrics}

    def _set_last_backward(self, last: bool) -> None:
        """Say whether this backward pass reduces gradients and frees gathered parameters.

        The last one always does. The others do if `reduces_each_micro_batch`; otherwise gradients
        are accumulated locally, and there is one reduction a step.
        """
        reduce = last or self.reduces_each_micro_batch
        self.module.set_requires_gradient_sync(reduce)
        self.module.set_is_last_backward(reduce)
        self.module.set_reshard_after_backward(reduce)

    # Weights

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device("parameters"):
            yield from self._with_tied(self._merged(self._whole))

    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        # Adapters are merged into the shards. Only adapters are gathered.
        with self._on_device("parameters"):
            if part == "merged":
                yield from self._with_tied(self._merged(self._moved))
                return
            adapter = self._part.adapter
            if adapter is None:
                raise ConfigError(
                    "the rollout engine holds adapters, but the trained model has none; set "
                    "model.lora or rollout.load_adapters=false",
                    key="actor_rollout_ref.rollout.load_adapters",
                )
            if part == "unmerged":
                base = merged_weights(self._shards(), adapter, self._moved, adapted=False)
                yield from self._with_tied(base)
            for name, shard in self._shards():
                if adapters.is_adapter(name):
                    yield adapters.scaled_part(name, self._whole(shard), adapter)

    def save_hf(self, folder: str | Path) -> None:
        adapter, base = self._part.adapter, self.model_config.path
        # A head that is trained too is not in an adapter, which would then not be complete.
        alone = adapter if self._token_model.adapted and self.head == "lm" else None

        def write_more(folder: Path) -> None:
            copy_processor(base, folder)
            if alone is not None:
                adapters.export_adapter(folder / ADAPTER_FOLDER, parts, alone, base)

        with self._on_device("parameters"):
            parts = {
                n: self._whole(p) for n, p in self._shards() if alone and adapters.is_adapter(n)
            }
            weights = self._merged(self._whole)
            export_model(folder, weights, self.module, self.model_config, self.head, write_more)

    def _shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and the buffers that are saved, by their names in the model."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self.module.named_buffers():
            if name in self._saved_buffers:
                yield name, buffer

    def _merged(self, whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, tensor) once for each weight, adapters merged unless off."""
        adapted = self._token_model.adapted
        return merged_weights(self._shards(), self._part.adapter, whole, adapted=adapted)

    def _with_tied(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            yield name, tensor
            for alias in self._tied.get(name, ()):
                yield alias, tensor

    def _moved(self, shard: Tensor) -> Tensor:
        """Return a shard on the device, where collectives run."""
        return shard.to(self.device)

    def _whole(self, shard: Tensor) -> Tensor:
        """Return the whole tensor of a shard, on the device. All ranks call it."""
        moved = self._moved(shard)
        return moved.full_tensor() if isinstance(moved, DTensor) else moved

    def without_adapters(self) -> FSDPEngine:
        if self._part.adapter is None:
            raise ConfigError("this engine has no adapters, because model.lora is not set")
        base = copy(self)
        base.optimizer = None
        base._token_model = self._token_model.without_adapters()
        return base

    def _state(self, *, save: bool, whole: bool = False) -> dict[str, Tensor]:
        # A checkpoint does not hold what is frozen.
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        state = {f"model.{name}": t for name, t in self._shards() if name not in frozen}
        moments = {} if self.optimizer is None else self.optimizer.tensors()
        return state | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def _take(self, state: Mapping[str, Tensor | Block]) -> dict[str, Tensor]:
        found = {name.removeprefix("optimizer."): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def _own_scalars(self) -> Mapping[str, object]:
        """Return what a checkpoint holds of the frozen weights: dtype → a checksum, under `FROZEN`.

        {} if nothing is frozen. A checksum is the sum of the bits of all elements, as integers
        modulo 2**64, so it does not depend on how the weights are sharded.
        """
        if not self._part.frozen:
            return {}
        own = Counter[str]()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                continue
            block = block_of(parameter.detach(), rank())
            if not block.is_first_copy or not block.data.numel():
                continue
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
            bits = block.data.contiguous().view(integers[block.data.element_size()])
            own[str(parameter.dtype).removeprefix("torch.")] += int(bits.sum(dtype=torch.int64))
        totals = Counter[str]()
        for sums in gather_over_ranks(own):
            totals.update(sums)
        return {FROZEN: {name: value % 2**64 for name, value in totals.items()}}

    def _check_saved(
        self, folder: str | Path, saved: Mapping[str, object], state: Collection[str]
    ) -> None:
        before, now = saved.get(FROZEN), self._own_scalars().get(FROZEN)
        # Another compute dtype rounds them differently, so then nothing can be compared.
        if not (isinstance(before, dict) and isinstance(now, dict)):
            before = now = {}
        if before.keys() == now.keys() and before != now:
            raise CheckpointError(
                f"the checkpoint in {folder} holds trained weights only, and its frozen weights "
                "were others than those of this model; set model.path (and model.freeze or "
                "model.lora) to what they were in that run",
                path=str(folder),
            )
        if self._part.frozen:
            check_all_taken(folder, state, "model.")

    # Memory

    def _end_pass(self, *, failed: bool) -> None:
        if failed:
            forget_failed_pass(self.module)
        for unit in self._units:  # so that the next pass sees every change of the shards
            unit.reshard()

    def _tensors(self, state: State) -> Iterator[Tensor]:
        """Yield the tensors of a state. With `engine.offload_policy`, only buffers are on the
        device. Gradients are freed after each step."""
        on_device = not self.config.offload_policy
        if state == "parameters":
            yield from map(local_shard, self.module.parameters() if on_device else ())
            yield from self.module.buffers()
        elif state == "moments" and self.optimizer is not None and on_device:
            yield from self.optimizer.existing_moments()


@contextmanager
def _reference_model(reference: TrainEngine | None) -> Iterator[TokenModel | None]:
    """Give the reference's model within the block, on the device; None if there is no reference."""
    if reference is None:
        yield None
        return
    if not isinstance(reference, FSDPEngine):
        raise ConfigError(
            "KL over the vocabulary needs policy and reference in engines of the same kind, but "
            f"the reference's engine is {type(reference).__name__}; set ref.engine.name=fsdp"
        )
    with reference._on_device("parameters"):
        yield reference._token_model


def merged_weights(
    named: Iterable[tuple[str, Tensor]],
    adapter: adapters.Adapter | None,
    whole: Callable[[Tensor], Tensor],
    *,
    adapted: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model, whole tensor): adapted weights merged, adapters left out.

    Args:
        named: the shards of the model, by names in it.
        whole: returns the whole tensor of a shard; all ranks call it in the same order.
        adapted: False: the weights of the base model.
    """
    shards = dict(named)
    for name, shard in shards.items():
        if adapter is None or not (adapters.is_adapter(name) or adapters.BASE in name):
            yield name, whole(shard)
        elif not adapters.is_adapter(name):
            weight = whole(shard)
            if adapted and name.endswith(f"{adapters.BASE}.weight"):
                a, b = (whole(shards[part]) for part in adapters.parts_of(name))
                weight = _merged_shard(weight, a, b, adapter.scaling)
            yield adapters.base_name(name), weight


def _merged_shard(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return `merged`, of DTensors with the shard of W; all ranks of a mesh call it together."""
    if not (isinstance(weight, DTensor) and isinstance(a, DTensor) and isinstance(b, DTensor)):
        return adapters.merged(weight, a, b, scaling)
    block = block_of(weight, 0)
    spans = zip(block.offset, block.data.shape, strict=True)
    rows, columns = (slice(first, first + size) for first, size in spans)
    whole_a, whole_b = a.full_tensor(), b.full_tensor()
    shard = adapters.merged(block.data, whole_a[:, columns], whole_b[rows], scaling)
    return sharded_like(shard, weight)


@contextmanager
def dropout_on(model: nn.Module, adapter: adapters.Adapter | None) -> Iterator[None]:
    """Within the block, adapters drop inputs with the probability of the settings.

    The rest of the model stays in evaluation mode. Outside of an update nothing is dropped, so that
    a log-probability is a function of the weights.
    """
    names = ".lora_dropout."
    layers = []
    if adapter is not None and adapter.dropout:
        layers = [module for name, module in model.named_modules() if names in f"{name}."]
    for layer in layers:
        layer.train(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(False)
