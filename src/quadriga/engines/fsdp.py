"""The training engine over FSDP2.

The training engine over FSDP2 (`fully_shard`), on one rank or many, with CPUs or accelerators.

Concurrency, for every method:

consumes      this rank's rows of a batch
waits for     the other ranks of the group, which must call the same methods in the same order
produces      numbers for each response token, or one optimizer step
unblocked by  the call of the last rank; a rank without rows computes a dummy micro-batch, so that
              the other ranks need not wait for it

The weights of a sharded model: its shards, whole tensors under checkpoint names, its export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.hf_export import export_hf
from quadriga.checkpoint.rank_state import (
    check_all_taken,
    load_rank_state,
    read_scalars,
    save_rank_state,
)
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.base import (
    SKIPPED_STEPS,
    Batch,
    HeadKind,
    LossFn,
    Outputs,
    OwnWeights,
    TrainEngine,
    WeightPart,
)
from quadriga.engines.loading import LoadedModel, exported_tokenizer, in_local_folders, load_sharded
from quadriga.engines.micro_batches import (
    dummy_batch,
    micro_batches_of_ranks,
    select_rows,
)
from quadriga.engines.offload import DeviceMemory
from quadriga.engines.optimizers.choice import build_optimizer
from quadriga.engines.optimizers.rules import local_shard
from quadriga.engines.optimizers.sharded import (
    ShardedOptimizer,
    check_schedule,
)
from quadriga.engines.sharding import (
    MIN_UNIT_PARAMETERS,
    exceeds_unsharded_limit,
    forget_failed_pass,
    fsdp_units,
)
from quadriga.engines.token_model import Images, TokenModel, check_batch, images_of
from quadriga.engines.trained_part import check_frozen, dropout_on, frozen_scalars, merged_weights
from quadriga.errors import ConfigError
from quadriga.models.adapters import export_adapter, is_adapter, scaled_part
from quadriga.models.images import MultiModalRows, copy_processor
from quadriga.models.score_head import padding_token
from quadriga.models.weights import stored_dtypes
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import (
    SHARD,
    init_distributed,
    local_device,
    rank,
    sum_metrics_over_ranks,
    sum_over_ranks,
    world_size,
)
from quadriga.parallel.model_ranks import model_ranks, shard_meshes
from quadriga.protocol import fields

_CPU = torch.device("cpu")
State = Literal["parameters", "moments"]
"""What an engine can offload: the model's parameters, the optimizer's moments."""


class FSDPEngine:
    """A causal language model or a value model, sharded over the ranks. See `TrainEngine`.

    With an optimizer, parameters are float32 at least and only the computation is in
    `engine.dtype`. A frozen model has parameters in `engine.dtype`.

    Args:
        optim: None for a frozen model, for example the reference policy.
        head: "lm" for log-probabilities, "value" for one value a token, "score" for a reward
            model.
        device: the device of this rank, or its type ("cuda").
        total_steps: optimizer steps of the run, if `optim.total_steps` is not set.
        packed: whether to pack rows. None: if the model supports it.
        min_unit_parameters: layers with fewer parameters are not FSDP units of their own.

    Raises:
        ModelError: the folder does not hold a suitable model.
        ConfigError: settings are in conflict.
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
        self.config = engine
        self.model_config = model = in_local_folders(model)
        self.device = local_device(device)
        if optim is not None:
            total_steps = total_steps if optim.total_steps is None else optim.total_steps
            check_schedule(optim, total_steps)
        init_distributed(self.device.type)
        meshes = shard_meshes(engine, self.device)
        self._ranks = model_ranks(engine, self.device.type)
        dtype = compute_dtype(engine.dtype, self.device)
        reduce_dtype = compute_dtype(engine.reduce_dtype, self.device)
        loaded = load_sharded(
            model,
            engine,
            head,
            self.device,
            trained=optim is not None,
            packed=packed,
            min_unit_parameters=min_unit_parameters,
            ranks=self._ranks,
            meshes=meshes,
        )
        self.module, self._token_model = loaded.module, loaded.token_model
        self._weights = ModelWeights(loaded, model, head, self.device)
        self._part = loaded.part
        self._units = fsdp_units(self.module)
        early = engine.reduce_each_micro_batch
        if early is None:
            early = exceeds_unsharded_limit(self.module, dtype, reduce_dtype)
        self.reduces_each_micro_batch = early
        self.optimizer: ShardedOptimizer | None = None
        if optim is not None:
            self.optimizer = build_optimizer(
                self.module,
                optim,
                total_steps,
                shard_group=meshes.whole.get_group(SHARD),
                device=self.device,
            )
        self._memory: DeviceMemory[State] = DeviceMemory(self.device, self._tensors)
        if engine.param_offload:
            self._memory.offload("parameters")
        if engine.optimizer_offload:
            self._memory.offload("moments")

    @property
    def optimizer_steps(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.step_count

    # Computation

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> Outputs:
        micro_batches = self.micro_batches(batch, micro_batch_size=micro_batch_size, images=images)
        shape = batch[fields.RESPONSE_MASK].shape
        outputs: Outputs = {}
        compute = partial(self._token_model, temperature=temperature, entropy=entropy)
        with self._on_device("parameters"), torch.no_grad():
            for rows in micro_batches:
                micro = dummy_batch() if rows is None else select_rows(batch, rows, _CPU)
                _keep(outputs, compute(micro, images=images_of(images, rows)), rows, shape)
        return outputs

    def train_step(
        self,
        mini_batch: Batch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        reference: TrainEngine | None = None,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> dict[str, float]:
        if self.optimizer is None:
            raise ConfigError("this engine has no optimizer, because it was built with optim=None")
        plan = self.micro_batches(mini_batch, micro_batch_size=micro_batch_size, images=images)
        totals = {"loss": 0.0}  # also if no rank has rows
        dropout = dropout_on(self.module, self._part.adapter)
        with self._on_device("parameters"), _reference_model(reference) as ref, dropout:
            compute = partial(
                self._token_model, temperature=temperature, entropy=entropy, reference=ref
            )
            for index, rows in enumerate(plan):
                self._set_last_backward(index == len(plan) - 1)
                of_rows = partial(compute, images=images_of(images, rows))
                self._accumulate(mini_batch, rows, loss_fn, totals, of_rows)
            # Activations and whole gradients are freed before the moments come to the device.
            with self._on_device("moments"):
                norm, rate = self.optimizer.step()
        # The ranks of a model-parallel group have computed the same numbers.
        metrics = sum_metrics_over_ranks(totals if self._ranks.is_first else {})
        metrics |= {
            "grad_norm": norm,
            "lr": rate,
            SKIPPED_STEPS: float(self.optimizer.skipped),
            "micro_batches": float(len(plan)),
        }
        return metrics

    def _accumulate(
        self,
        mini_batch: Batch,
        rows: Tensor | None,
        loss_fn: LossFn,
        totals: dict[str, float],
        compute: Callable[[Batch], Outputs],
    ) -> None:
        """Run forward and backward of one micro-batch; add its shares to gradients and totals."""
        if rows is None:
            # The backward pass must run for FSDP's collectives, with a gradient of 0.
            outputs = compute(dummy_batch())
            zero = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
            torch.autograd.backward(zero)
            return
        outputs = compute(select_rows(mini_batch, rows, _CPU))
        loss, metrics = loss_fn(outputs, select_rows(mini_batch, rows, self.device))
        torch.autograd.backward(loss)
        for name, value in {"loss": loss.detach(), **metrics}.items():
            totals[name] = totals.get(name, 0.0) + float(value)

    def micro_batches(
        self, batch: Batch, *, micro_batch_size: int | None = None, images: Images = None
    ) -> list[Tensor | None]:
        check_batch(batch, images, self.module.config)
        return micro_batches_of_ranks(
            batch,
            micro_batch_size,
            self.config,
            self.device,
            share_prompts=self._token_model.packed,
            cost=self._token_model.cost,
        )

    def _set_last_backward(self, last: bool) -> None:
        """Say whether this backward pass reduces gradients and frees gathered parameters.

        The last one always does. The others do if `reduces_each_micro_batch`; otherwise gradients
        are accumulated locally, and there is one reduction a step.
        """
        reduce = last or self.reduces_each_micro_batch
        self.module.set_requires_gradient_sync(reduce)
        self.module.set_is_last_backward(reduce)
        self.module.set_reshard_after_backward(reduce)

    def global_counts(self, *counts: float | Tensor) -> list[float]:
        own = [float(count) if self._ranks.is_first else 0.0 for count in counts]
        return sum_over_ranks(own, self.device)

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

    def _state(self) -> dict[str, Tensor]:
        shards = self._weights.trained_shards()
        tensors = {f"model.{name}": tensor for name, tensor in shards}
        if self.optimizer is not None:
            moments = self.optimizer.tensors()
            tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        return tensors

    def save(self, folder: str | Path, step: int = 0) -> list[SavedFile]:
        scalars = {} if self.optimizer is None else self.optimizer.scalars()
        with self._on_device("parameters", "moments"):
            scalars |= frozen_scalars(self._part, self.module)
            return save_rank_state(
                folder, self._state(), scalars, rank=rank(), world_size=world_size(), step=step
            )

    def load(self, folder: str | Path, step: int | None = None) -> None:
        saved = read_scalars(folder, step=step)
        if self.optimizer is not None:
            self.optimizer.check_scalars(saved, folder)
        with self._on_device("parameters", "moments"):
            check_frozen(saved, frozen_scalars(self._part, self.module), folder)
            state = self._state()
            if self._part.frozen:
                check_all_taken(folder, state, "model.")
            load_rank_state(folder, state, rank=rank(), step=step)
            if self.optimizer is not None:
                moments = {n.removeprefix("optimizer."): t for n, t in state.items()}
                self.optimizer.load(moments, saved)

    def save_hf(self, folder: str | Path) -> None:
        with self._on_device("parameters"):
            self._weights.export(folder, adapted=self._token_model.adapted)

    def without_adapters(self) -> FSDPEngine:
        """Return the base model, frozen, on the same weights; `ConfigError` without adapters."""
        if self._part.adapter is None:
            raise ConfigError("this engine has no adapters, because model.lora is not set")
        base = copy(self)
        base.optimizer = None
        base._token_model = self._token_model.without_adapters()
        return base

    # Memory

    def offload(self) -> None:
        self._reshard()
        self._memory.offload("parameters", "moments")
        self._memory.return_freed()

    def reload(self) -> None:
        if not self.config.param_offload:
            self._memory.reload("parameters")
        if not self.config.optimizer_offload:
            self._memory.reload("moments")

    @contextmanager
    def _lend_model(self) -> Iterator[TokenModel]:
        """Give the model to another engine, with its weights on the device within the block."""
        with self._on_device("parameters"):
            yield self._token_model

    @contextmanager
    def _on_device(self, *states: State) -> Iterator[None]:
        """Reload what a method needs, and offload it again at the end of the block."""
        reloaded = self._memory.reload(*states)
        try:
            yield
        except (Exception, KeyboardInterrupt):  # not the end of a stream that is not exhausted
            forget_failed_pass(self.module)
            raise
        finally:
            self._reshard()
            self._memory.offload(*reloaded)

    def _reshard(self) -> None:
        """Free the gathered parameters, so that the next pass sees every change of the shards."""
        for unit in self._units:
            unit.reshard()

    def _tensors(self, state: State) -> Iterator[Tensor]:
        """Yield the tensors of a state on the device. There are no moments before the first step.

        With `engine.offload_policy`, only buffers are on the device.
        """
        on_device = not self.config.offload_policy
        if state == "parameters":
            yield from map(local_shard, self.module.parameters() if on_device else ())
            yield from self.module.buffers()
        elif self.optimizer is not None and on_device:
            yield from self.optimizer.existing_moments()


def _keep(outputs: Outputs, found: Outputs, rows: Tensor | None, shape: torch.Size) -> None:
    """Write what a micro-batch has computed to its rows of the outputs."""
    for name, values in found.items():
        whole = outputs.setdefault(name, torch.zeros(shape))
        if rows is not None:
            whole[rows] = values.float().to(whole.device)


@contextmanager
def _reference_model(reference: TrainEngine | None) -> Iterator[TokenModel | None]:
    """Give the reference's model within the block; None if there is no reference."""
    if reference is None:
        yield None
        return
    if not isinstance(reference, FSDPEngine):
        raise ConfigError(
            "KL over the vocabulary needs policy and reference in engines of the same kind, but "
            f"the reference's engine is {type(reference).__name__}; set ref.engine.name=fsdp"
        )
    with reference._lend_model() as model:
        yield model


ADAPTER_FOLDER = "adapter"
"""Folder of the adapter alone, in the export of a merged model."""


class ModelWeights:
    """The weights of one model. Whole tensors are gathered one at a time, by all ranks together.

    Args:
        config: of the model, with local folders.
        device: where collectives run.
    """

    def __init__(
        self, loaded: LoadedModel, config: ModelConfig, head: HeadKind, device: torch.device
    ) -> None:
        self.module, self.part = loaded.module, loaded.part
        self.tied, self.saved_buffers = loaded.tied, loaded.saved_buffers
        self.config, self.head, self.device = config, head, device
        self.tokenizer_path = exported_tokenizer(config)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and the buffers that are saved, by their names in the model."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self.module.named_buffers():
            if name in self.saved_buffers:
                yield name, buffer

    def trained_shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `shards` without those that are frozen, which a checkpoint does not hold."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return ((name, tensor) for name, tensor in self.shards() if name not in frozen)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor of a shard, on the device."""
        # A shard in host memory is copied to the device, where collectives run.
        shard = self._on_device(tensor)
        return shard.full_tensor() if isinstance(shard, DTensor) else shard

    def full(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, whole tensor) once for each weight; adapters are merged.

        `adapted`: False for the weights of the base model.
        """
        return merged_weights(self.shards(), self.part.adapter, self.whole, adapted=adapted)

    def stream(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield `full` with every name of tied weights."""
        return self._with_tied(self.full(adapted=adapted))

    def shard_stream(self, *, adapted: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield `stream`, with the shards of this rank as `DTensor`s in place of whole tensors.

        Adapters are merged into the shards. Only adapters are gathered.
        """
        adapter = self.part.adapter
        merged = merged_weights(self.shards(), adapter, self._on_device, adapted=adapted)
        return self._with_tied(merged)

    def unmerged_stream(self, *, base: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of every adapter whole, as `scaled_part` names them.

        Before them, if `base`, the weights of the base model as `shard_stream` yields them.

        Raises `ConfigError` if the model has no adapters.
        """
        adapter = self.part.adapter
        if adapter is None:
            raise ConfigError(
                "the rollout engine holds adapters, but the trained model has none; set model.lora "
                "or rollout.load_adapters=false",
                key="actor_rollout_ref.rollout.load_adapters",
            )
        if base:
            yield from self.shard_stream(adapted=False)
        for name, shard in self.shards():
            if is_adapter(name):
                yield scaled_part(name, self.whole(shard), adapter)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _with_tied(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            yield name, tensor
            for alias in self.tied.get(name, ()):
                yield alias, tensor

    def export(self, folder: str | Path, *, adapted: bool) -> None:
        """Write a Hugging Face folder of the merged model, with the adapter alone inside it.

        Raises `ModelError` if the tokenizer that the model was loaded with cannot be loaded.
        """
        dtypes, config = stored_dtypes(self.config.path), self.config
        export_hf(
            folder,
            dtypes.cast(self.full(adapted=adapted)),
            dtypes.config(self._config()),
            generation=getattr(self.module, "generation_config", None),
            tokenizer_path=self.tokenizer_path,
            trust_remote_code=config.trust_remote_code,
            write=rank() == 0,
            extra=self._extra(adapted=adapted),
        )

    def _extra(self, *, adapted: bool) -> Callable[[Path], None]:
        """Return what writes the image processor and the adapter into an export."""
        adapter = self._write_adapter() if adapted else None

        def write(folder: Path) -> None:
            copy_processor(self.config.path, folder)
            if adapter is not None:
                adapter(folder)

        return write

    def _config(self) -> PreTrainedConfig:
        """Return the config of the export: a sequence classifier needs a padding token."""
        config: PreTrainedConfig = deepcopy(self.module.config)
        if self.head == "score":
            config.pad_token_id = padding_token(
                self.config.path,
                self.config.tokenizer_path or self.config.path,
                trust_remote_code=self.config.trust_remote_code,
            )
        return config

    def _write_adapter(self) -> Callable[[Path], None] | None:
        """Return what writes the adapter into an export; None if it would not be complete."""
        adapter, base = self.part.adapter, self.config.path
        if adapter is None or self.head != "lm":  # the head is trained too, and not in an adapter
            return None
        parts = {name: self.whole(p) for name, p in self.shards() if is_adapter(name)}
        return lambda folder: export_adapter(folder / ADAPTER_FOLDER, parts, adapter, base)
