"""The training engine over FSDP2 (`fully_shard`), on one rank or many, on CPUs or accelerators."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from quadriga.checkpoint.shards import Block, check_all_taken
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import sharding
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
from quadriga.engines.loading import load_sharded
from quadriga.engines.micro_batches import dummy_batch, select_rows
from quadriga.engines.optimizers.rules import local_shard
from quadriga.engines.optimizers.sharded import build_optimizer
from quadriga.engines.sharding import (
    MIN_UNIT_PARAMETERS,
    forget_failed_pass,
    fsdp_units,
    unsharded_bytes,
)
from quadriga.engines.token_model import TokenModel
from quadriga.engines.trained_part import check_frozen, dropout_on, frozen_scalars
from quadriga.errors import ConfigError
from quadriga.models.images import MultiModalRows, check_images, image_tokens_of
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import SHARD
from quadriga.parallel.model_ranks import model_ranks, shard_meshes
from quadriga.protocol import fields

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
        engine, meshes = self.config, shard_meshes(self.config, self.device)
        ranks = model_ranks(engine, self.device.type)
        self.reports = ranks.is_first
        self._weights = load_sharded(
            self.model_config,
            engine,
            self.head,
            self.device,
            trained=optim is not None,
            packed=self._packed,
            min_unit_parameters=self._min_unit_parameters,
            ranks=ranks,
            meshes=meshes,
        )
        self.module, self._part = self._weights.module, self._weights.part
        self._token_model = self._weights.token_model
        self.shares_prompts, self.cost = self._token_model.packed, self._token_model.cost
        self._units = fsdp_units(self.module)
        early, dtypes = engine.reduce_each_micro_batch, (engine.dtype, engine.reduce_dtype)
        if early is None:
            kept = unsharded_bytes(self.module, *(compute_dtype(d, self.device) for d in dtypes))
            early = kept > sharding.MAX_UNSHARDED_BYTES
        self.reduces_each_micro_batch = early
        if optim is not None:
            group = meshes.whole.get_group(SHARD)
            self.optimizer = build_optimizer(
                self.module, optim, self.total_steps, shard_group=group, device=self.device
            )

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
            chosen,
            temperature=of.temperature,
            entropy=of.entropy,
            reference=reference,
            images=images,
        )

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
            yield from self._weights.stream(adapted=self._token_model.adapted)

    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        with self._on_device("parameters"):
            if part == "merged":
                yield from self._weights.shard_stream(adapted=self._token_model.adapted)
            else:
                yield from self._weights.unmerged_stream(base=part == "unmerged")

    def save_hf(self, folder: str | Path) -> None:
        with self._on_device("parameters"):
            self._weights.export(folder, adapted=self._token_model.adapted)

    def without_adapters(self) -> FSDPEngine:
        if self._part.adapter is None:
            raise ConfigError("this engine has no adapters, because model.lora is not set")
        base = copy(self)
        base.optimizer = None
        base._token_model = self._token_model.without_adapters()
        return base

    def _state(self, *, save: bool) -> dict[str, Tensor]:
        state = {f"model.{name}": tensor for name, tensor in self._weights.trained_shards()}
        moments = {} if self.optimizer is None else self.optimizer.tensors()
        return state | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def _take(self, state: Mapping[str, Tensor | Block]) -> dict[str, Tensor]:
        found = {name.removeprefix("optimizer."): tensor for name, tensor in state.items()}
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    def _own_scalars(self) -> Mapping[str, object]:
        return frozen_scalars(self._part, self.module)

    def _check_saved(
        self, folder: str | Path, saved: Mapping[str, object], state: Collection[str]
    ) -> None:
        check_frozen(saved, frozen_scalars(self._part, self.module), folder)
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
