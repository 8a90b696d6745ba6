"""The training engine over Megatron-core: tensor, pipeline, context, expert, data parallel ranks.

Ranks with one data-parallel number compute the same rows, each with its part of the model. They
must be given the same batch, and return the same outputs and metrics.

Concurrency, for every method:

consumes      the rows of this data-parallel rank
waits for     all ranks of the group, which must call the same methods in the same order
produces      numbers for each response token, or one optimizer step
unblocked by  the call of the last rank; a rank without rows computes dummy micro-batches
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.rank_state import load_rank_state, read_scalars, save_rank_state
from quadriga.checkpoint.shards import Block
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
from quadriga.engines.loading import in_local_folders
from quadriga.engines.megatron.families import check_sizes, megatron_model
from quadriga.engines.megatron.model import MicroBatch, Pipeline, transformer_config
from quadriga.engines.megatron.optimizer import MegatronOptimizer
from quadriga.engines.megatron.ranks import join_ranks
from quadriga.engines.megatron.settings import (
    check_device,
    check_installed,
    check_settings,
    sizes_of,
)
from quadriga.engines.megatron.weights import FolderModel, RankWeights
from quadriga.engines.micro_batches import (
    check_fields,
    dummy_batch,
    micro_batches_of_ranks,
    select_rows,
)
from quadriga.engines.offload import DeviceMemory
from quadriga.engines.optimizers.sharded import check_schedule
from quadriga.engines.sequence_cost import sequence_cost
from quadriga.errors import ConfigError
from quadriga.models.images import MultiModalRows
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import (
    init_distributed,
    local_device,
    rank,
    sum_metrics_over_ranks,
    world_size,
)
from quadriga.protocol import fields

_CPU = torch.device("cpu")
State = Literal["parameters", "gradients", "moments"]
"""What an engine can offload: parameters; their gradients, which are freed; and the optimizer's
moments with the float32 copies of parameters."""
_FREED: tuple[State] = ("gradients",)


class MegatronEngine:
    """A causal language model or a value model on Megatron-core's ranks. See `TrainEngine`.

    Args:
        optim: None for a frozen model.
        head: "lm" for log-probabilities, "value" for one value a token, "score" for a reward model.
        device: the device of this rank, or its type ("cuda").
        total_steps: optimizer steps of the run, if `optim.total_steps` is not set.

    Raises:
        ConfigError: Megatron-core is missing, a setting is not for this engine, or the model does
            not divide by the ranks.
        ModelError: the folder does not hold a suitable model.
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
    ) -> None:
        check_installed()
        check_settings(model, engine, optim)
        self.config, self.head = engine, head
        self.device = local_device(device)
        check_device(self.device.type)
        if optim is not None:
            total_steps = total_steps if optim.total_steps is None else optim.total_steps
            check_schedule(optim, total_steps)
        init_distributed(self.device.type)
        self.model_config = model = in_local_folders(model)
        self.folder = folder = FolderModel.of(model, head, trained=optim is not None)
        sizes = sizes_of(engine)
        check_sizes(folder.config, sizes, "engine")
        self.ranks = ranks = join_ranks(sizes)
        dtype = compute_dtype(engine.dtype, self.device)
        recompute = bool(model.gradient_checkpointing) and optim is not None
        transformer = transformer_config(folder.config, ranks, dtype, recompute=recompute)
        kernels = folder.kernels(engine.attention, sizes, dtype, self.device)
        self.pipeline = Pipeline(
            folder.config, transformer, ranks, head, kernels, self.device, trained=optim is not None
        )
        self._parameters = self.pipeline.parameters
        stored = megatron_model(
            folder.config,
            folder.weights,
            tensor_ranks=sizes.tensor,
            stages=sizes.pipeline,
            chunks=sizes.chunks,
        )
        self._weights = RankWeights(stored, ranks, folder.tied)
        with torch.no_grad():
            folder.read_into(self._weights, self._parameters)
        self._cost = sequence_cost(folder.config, head, self.device.type, engine.attention)
        self.optimizer: MegatronOptimizer | None = None
        self._memory: DeviceMemory[State] = DeviceMemory(self.device, self._tensors, freed=_FREED)
        if optim is not None:
            self.optimizer = self._build_optimizer(optim, total_steps, dtype)
        if engine.param_offload:
            self._memory.offload("parameters", "gradients")
        if engine.optimizer_offload:
            self._memory.offload("moments")

    def _build_optimizer(
        self, optim: OptimConfig, total_steps: int | None, dtype: torch.dtype
    ) -> MegatronOptimizer:
        engine = self.config
        optimizer = MegatronOptimizer(
            self._parameters,
            self._weights,
            self.ranks,
            optim,
            total_steps,
            device=self.device,
            distributed=engine.distributed_optimizer,
        )
        if dtype.itemsize < 4:  # the copies would begin with the digits of the parameters
            with torch.no_grad():
                self.folder.read_into(self._weights, optimizer.masters)
        return optimizer

    @property
    def optimizer_steps(self) -> int:
        return 0 if self.optimizer is None else self.optimizer.inner.step_count

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

        def keep(columns: Tensor, micro: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Any]:
            return columns, (rows, micro.outputs(columns, self.head))

        select = partial(self._micro_batch, batch, temperature=temperature, entropy=entropy)
        with self._on_device("parameters"), torch.no_grad():
            computed = self.pipeline.run(micro_batches, select, keep, train=False)
        names = MicroBatch.output_names(self.head, entropy=entropy)
        outputs: Outputs = {name: torch.zeros(shape) for name in names}
        for rows, found in computed:
            if rows is not None:
                for name, values in found.items():
                    outputs[name][rows] = values.float().cpu()
        return _from_last_stage(outputs, self.ranks.pipeline_group, self.device)

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
        if reference is not None:
            raise ConfigError(
                "KL over the vocabulary (kl_loss_type=full) is not built for engine.name=megatron; "
                "set another kl_loss_type, or engine.name=fsdp"
            )
        micro_batches = self.micro_batches(
            mini_batch, micro_batch_size=micro_batch_size, images=images
        )
        select = partial(self._micro_batch, mini_batch, temperature=temperature, entropy=entropy)

        def loss_of(columns: Tensor, micro: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Any]:
            if rows is None:
                return columns.sum() * 0.0, {}
            outputs = micro.outputs(columns, self.head)
            loss, metrics = loss_fn(outputs, select_rows(mini_batch, rows, self.device))
            return loss, {"loss": loss.detach(), **metrics}

        totals = {"loss": 0.0}
        with self._on_device("parameters", "gradients"):
            self.pipeline.zero_gradients()  # a step that failed has left gradients
            for metrics in self.pipeline.run(micro_batches, select, loss_of, train=True):
                for name, value in metrics.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
            # Activations are freed before the moments come to the device.
            with self._on_device("moments"):
                norm, rate = self.optimizer.step()
        # One rank reports what the ranks with the same rows have computed together.
        found = sum_metrics_over_ranks(totals if self.ranks.reports else {"loss": 0.0})
        return found | {
            "grad_norm": norm,
            "lr": rate,
            SKIPPED_STEPS: float(self.optimizer.inner.skipped),
            "micro_batches": float(len(micro_batches)),
        }

    def micro_batches(
        self,
        batch: Batch,
        *,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> list[Tensor | None]:
        _check_text_alone(images)
        check_fields(batch)
        return micro_batches_of_ranks(
            batch,
            micro_batch_size,
            self.config,
            self.device,
            share_prompts=True,
            cost=self._cost,
            stages=self.ranks.sizes.pipeline,
            multiple_of=self.ranks.sizes.pipeline if self.ranks.sizes.chunks > 1 else 1,
        )

    def _micro_batch(
        self, batch: Batch, rows: Tensor | None, *, temperature: float, entropy: bool
    ) -> MicroBatch:
        chosen = dummy_batch() if rows is None else select_rows(batch, rows, _CPU)
        return MicroBatch.of(
            chosen, self.ranks, self.device, temperature=temperature, entropy=entropy
        )

    def global_counts(self, *counts: float | Tensor) -> list[float]:
        total = torch.tensor([float(c) for c in counts], dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.ranks.data_group)
        return total.tolist()

    # Weights

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device("parameters"), torch.no_grad():
            yield from self._weights.stream(self._detached())

    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        assert part == "merged", "adapters are refused by `check_settings`"
        with self._on_device("parameters"), torch.no_grad():
            yield from self._weights.shard_stream(self._detached())

    def _detached(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _blocks(self, *, save: bool) -> dict[str, Block]:
        """Return the blocks of weights and moments: to be written, or to be read into."""
        weights, optimizer = self._weights, self.optimizer
        values = self._detached()
        if optimizer is None:
            return weights.blocks("model.", values, written=weights.first_copy if save else None)
        # Float32 copies are on their owners only; what has no copy is on every rank.
        values |= {name: master.detach() for name, master in optimizer.masters.items()}
        written = optimizer.writes if save else None
        blocks = weights.blocks("model.", values, written=written)
        for moment, tensors in optimizer.tensors().items():
            blocks |= weights.blocks(f"optimizer.{moment}.", tensors, written=written)
        return blocks

    def save(self, folder: str | Path, step: int = 0) -> list[SavedFile]:
        scalars = {} if self.optimizer is None else self.optimizer.inner.scalars()
        with self._on_device("parameters", "moments"), torch.no_grad():
            blocks = self._blocks(save=True)
        return save_rank_state(
            folder, blocks, scalars, rank=rank(), world_size=world_size(), step=step
        )

    def load(self, folder: str | Path, step: int | None = None) -> None:
        saved = read_scalars(folder, step=step)
        if self.optimizer is not None:
            self.optimizer.inner.check_scalars(saved, folder)
        with self._on_device("parameters", "moments"), torch.no_grad():
            blocks = self._blocks(save=False)
            load_rank_state(folder, blocks, rank=rank(), step=step)
            self._weights.take("model.", blocks, self._detached())
            if self.optimizer is None:
                return
            masters = {name: m.detach() for name, m in self.optimizer.masters.items()}
            self._weights.take("model.", blocks, masters)
            moments = self.optimizer.tensors()
            for moment, tensors in moments.items():
                self._weights.take(f"optimizer.{moment}.", blocks, tensors)
            named = {f"{m}.{n}": t for m, tensors in moments.items() for n, t in tensors.items()}
            self.optimizer.inner.load(named, saved)

    def save_hf(self, folder: str | Path) -> None:
        tied = self._weights.tied
        weights = ((name, t) for name, t in self.state_stream() if name not in tied)
        self.folder.export(folder, weights)

    # Memory

    def offload(self) -> None:
        self._memory.offload("parameters", "gradients", "moments")
        self._memory.return_freed()

    def reload(self) -> None:
        if not self.config.param_offload:
            self._memory.reload("parameters", "gradients")
        if not self.config.optimizer_offload:
            self._memory.reload("moments")

    @contextmanager
    def _on_device(self, *states: State) -> Iterator[None]:
        """Reload what a method needs, and offload it again at the end of the block."""
        reloaded = self._memory.reload(*states)
        try:
            yield
        finally:
            self._memory.offload(*reloaded)

    def _tensors(self, state: State) -> Iterable[Tensor]:
        """Return the tensors of a state. There are no moments before the first step."""
        if state == "parameters":
            return [p.data for p in self._parameters.values()]
        if self.optimizer is None:
            return []
        if state == "gradients":
            return self.pipeline.gradient_buffers()
        return self.optimizer.held()


def _check_text_alone(images: MultiModalRows | None) -> None:
    if images is not None:
        raise ConfigError(
            "rows with images are not built for engine.name=megatron; set engine.name=fsdp"
        )


def _from_last_stage(outputs: Outputs, group: dist.ProcessGroup, device: torch.device) -> Outputs:
    """Return the outputs of the last stage, which has computed the same rows."""
    stages = dist.get_world_size(group)
    if stages > 1:
        last = dist.get_global_rank(group, stages - 1)
        for name, values in outputs.items():
            sent = values.to(device)
            dist.broadcast(sent, last, group=group)
            outputs[name] = sent.cpu()
    return outputs
