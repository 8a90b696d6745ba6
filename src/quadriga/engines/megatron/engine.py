"""The training engine over Megatron-core: tensor, pipeline, context, expert, data parallel ranks.

Ranks with one data-parallel number compute the same rows, each with its part of the model. They
must be given the same batch, and return the same outputs and metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quadriga.checkpoint.shards import Block
from quadriga.config.schema import OptimConfig
from quadriga.engines.base import (
    Batch,
    LossFn,
    Outputs,
    OwnWeights,
    Pass,
    State,
    TrainEngine,
    WeightPart,
)
from quadriga.engines.megatron.families import check_sizes
from quadriga.engines.megatron.model import MicroBatch, Pipeline, transformer_config
from quadriga.engines.megatron.ranks import join_ranks
from quadriga.engines.megatron.weights import FolderModel, OwnTensor, RankWeights
from quadriga.engines.micro_batches import dummy_batch, select_rows, sliced_rows
from quadriga.engines.optimizers import MOMENTS, AdamW, ShardedOptimizer
from quadriga.engines.sequence_cost import sequence_cost
from quadriga.errors import ConfigError
from quadriga.models.images import MultiModalRows
from quadriga.parallel.balancing import owners_of
from quadriga.parallel.device import compute_dtype

_CPU = torch.device("cpu")


class MegatronEngine(TrainEngine):
    """A causal language model or a value model on Megatron-core's ranks. See `TrainEngine`."""

    optimizer: MegatronOptimizer | None

    def _build(self, optim: OptimConfig | None) -> None:
        model, engine, device = self.model_config, self.config, self.device
        self.folder = folder = FolderModel(model, self.head, trained=optim is not None)
        check_sizes(folder.config, engine, "engine")
        self.ranks = ranks = join_ranks(engine)
        self.reports, self.stages = ranks.reports, engine.pipeline_parallel_size
        self.round_size = self.stages if ranks.chunks > 1 else 1
        dtype = compute_dtype(engine.dtype, device)
        recompute = bool(model.gradient_checkpointing) and optim is not None
        transformer = transformer_config(folder.config, ranks, dtype, device, recompute=recompute)
        kernels = folder.kernels(engine, dtype, device)
        self.pipeline = Pipeline(
            folder.config, transformer, ranks, self.head, kernels, device, trained=optim is not None
        )
        self._parameters = self.pipeline.parameters
        self._weights = RankWeights(folder, ranks)
        with torch.no_grad():
            folder.read_into(self._weights, self._parameters)
        self.cost = sequence_cost(folder.config, self.head, device.type, engine.attention)
        if optim is None:
            return
        self.optimizer = MegatronOptimizer(
            self._parameters,
            self._weights,
            optim,
            self.total_steps,
            device=device,
            distributed=engine.distributed_optimizer,
        )
        if dtype.itemsize < 4:  # the copies would begin with the digits of the parameters
            with torch.no_grad():
                folder.read_into(self._weights, self.optimizer.masters)

    # Computation

    def _check_images(self, batch: Batch, images: MultiModalRows | None) -> None:
        if images is not None:
            raise ConfigError(
                "rows with images are not built for engine.name=megatron; set engine.name=fsdp"
            )

    def _outputs(self, of: Pass) -> Iterator[tuple[Tensor | None, Outputs]]:
        def keep(columns: Tensor, micro: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Any]:
            return columns, (rows, micro.outputs(columns, self.head))

        yield from self.pipeline.run(of.plan, partial(self._micro_batch, of), keep, train=False)

    def _complete(self, outputs: Outputs) -> Outputs:
        """Return the outputs of the last stage, which has computed the same rows."""
        group = self.ranks.group("pipeline")
        stages = dist.get_world_size(group)
        if stages > 1:
            last = dist.get_global_rank(group, stages - 1)
            for name, values in outputs.items():
                sent = values.to(self.device)
                dist.broadcast(sent, last, group=group)
                outputs[name] = sent.cpu()
        return outputs

    def _accumulate(
        self, of: Pass, loss_fn: LossFn, reference: TrainEngine | None
    ) -> Iterator[Mapping[str, Tensor | float]]:
        if reference is not None:
            raise ConfigError(
                "KL over the vocabulary (kl_loss_type=full) is not built for engine.name=megatron; "
                "set another kl_loss_type, or engine.name=fsdp"
            )

        def loss_of(columns: Tensor, micro: MicroBatch, rows: Tensor | None) -> tuple[Tensor, Any]:
            if rows is None:
                return columns.sum() * 0.0, {}
            outputs = micro.outputs(columns, self.head)
            loss, metrics = loss_fn(outputs, select_rows(of.batch, rows, self.device))
            return loss, {"loss": loss.detach(), **metrics}

        self.pipeline.zero_gradients()  # a step that failed has left gradients
        yield from self.pipeline.run(of.plan, partial(self._micro_batch, of), loss_of, train=True)

    def _micro_batch(self, of: Pass, rows: Tensor | None) -> MicroBatch:
        chosen = dummy_batch() if rows is None else select_rows(of.batch, rows, _CPU)
        # Tensor-parallel ranks divide the tokens of a context-parallel rank once more.
        slices = self.ranks.engine.context_parallel_size * self.ranks.engine.tensor_parallel_size
        packed, own = sliced_rows(chosen, slices, self.ranks.of_tokens, self.device)
        return MicroBatch(packed, own, of.temperature, of.entropy)

    # Weights

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        with self._on_device("parameters"), torch.no_grad():
            yield from self._weights.stream(self._detached())

    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        assert part == "merged", "adapters are refused by `check_engine`"
        with self._on_device("parameters"), torch.no_grad():
            yield from self._weights.shard_stream(self._detached())

    def save_hf(self, folder: str | Path) -> None:
        tied = self._weights.tied
        weights = ((name, t) for name, t in self.state_stream() if name not in tied)
        self.folder.export(folder, weights)

    def _detached(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def _state(self, *, save: bool, whole: bool = False) -> dict[str, Block]:
        weights, optimizer = self._weights, self.optimizer
        values = self._detached()
        if optimizer is None:
            first = _every if whole else weights.first_copy
            return weights.blocks("model.", values, written=first if save else None)
        # Float32 copies are on their owners only; what has no copy is on every rank.
        values |= {name: master.detach() for name, master in optimizer.masters.items()}
        written = (_every if whole else optimizer.writes) if save else None
        blocks = weights.blocks("model.", values, written=written)
        for moment, tensors in optimizer.moments().items():
            blocks |= weights.blocks(f"optimizer.{moment}.", tensors, written=written)
        return blocks

    def _take(self, state: Mapping[str, Tensor | Block]) -> dict[str, Tensor]:
        blocks = {name: block for name, block in state.items() if isinstance(block, Block)}
        self._weights.take("model.", blocks, self._detached())
        if self.optimizer is None:
            return {}
        masters = {name: m.detach() for name, m in self.optimizer.masters.items()}
        self._weights.take("model.", blocks, masters)
        moments = self.optimizer.moments()
        for moment, tensors in moments.items():
            self._weights.take(f"optimizer.{moment}.", blocks, tensors)
        return {f"{m}.{n}": t for m, tensors in moments.items() for n, t in tensors.items()}

    # Memory

    def _tensors(self, state: State) -> Iterable[Tensor]:
        if state == "parameters":
            return [p.data for p in self._parameters.values()]
        if self.optimizer is None:
            return []
        return self.pipeline.gradient_buffers() if state == "gradients" else self.optimizer.held()


def _every(_: OwnTensor) -> bool:
    return True


class MegatronOptimizer(ShardedOptimizer):
    """AdamW over the parameters of a stage, on tensor, pipeline, context, expert and data parallel
    ranks.

    Megatron-core's data parallelism has summed the gradients over the ranks with the same
    parameters. Parameters in 16 bits have a copy in float32, which is updated.

    With `distributed`, each data-parallel rank has the moments and the copies of some of the
    parameters, updates these, and sends them to the others (ZeRO-1, arXiv 1910.02054 §5.1, by whole
    tensors):

        parameter        embedding   layer 0   layer 1   norm
        its owner        rank 0      rank 1    rank 1    rank 1       2 data-parallel ranks

    Args:
        parameters: of the stage, by name. Megatron-core's data parallelism adds up their gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weights: RankWeights,
        config: OptimConfig,
        total_steps: int | None,
        *,
        device: torch.device,
        distributed: bool,
    ) -> None:
        self._parameters, self._weights = parameters, weights
        self._tensors = {own.name: own for own in weights.tensors}
        self._owners = self._choose_owners(distributed)
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype.itemsize < 4 else p
            for name, p in parameters.items()
            if self.owns(self._tensors[name])
        }
        named = list(self.masters.items())
        rules: list[AdamW] = [AdamW(named, config)] if named else []
        super().__init__(rules, config, total_steps, shard_group=None, device=device)

    def owns(self, tensor: OwnTensor) -> bool:
        """Whether this rank updates a tensor."""
        owner = self._owners[tensor.name]
        return owner is None or owner == dist.get_rank(self._replicas(tensor))

    def _choose_owners(self, distributed: bool) -> dict[str, int | None]:
        """Return for each tensor the rank that updates it among those that have it; None: all."""
        owners: dict[str, int | None] = {}
        for of_expert in (False, True):
            names = sorted(t.name for t in self._tensors.values() if t.of_expert == of_expert)
            if not names:
                continue
            count = dist.get_world_size(self._replicas(self._tensors[names[0]]))
            if not distributed or count == 1:
                owners |= dict.fromkeys(names)
                continue
            sizes = [self._parameters[name].numel() for name in names]
            owners |= zip(names, owners_of(sizes, count), strict=True)
        return owners

    def _replicas(self, tensor: OwnTensor) -> dist.ProcessGroup:
        return self._weights.ranks.group("expert replicas" if tensor.of_expert else "replicas")

    def step(self) -> tuple[float, float]:
        """Clip the gradients and update. Returns (gradient norm, learning rate).

        Waits for: all ranks. Raises `NonFiniteError` as `ShardedOptimizer.step`.
        """
        for name, master in self.masters.items():
            master.grad = self._gradient(name)
        made = self.step_count - self.skipped
        norm, rate = super().step()
        if self.step_count - self.skipped > made:
            self.spread()
        return norm, rate

    def _gradient(self, name: str) -> Tensor:
        gradient: Tensor = vars(self._parameters[name])["main_grad"]
        return gradient

    @torch.no_grad()
    def spread(self) -> None:
        """Copy what was updated to the model's parameters, on all ranks that have them."""
        for name, parameter in self._parameters.items():
            tensor, owner = self._tensors[name], self._owners[name]
            if name in self.masters and self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])
            if owner is not None:
                group = self._replicas(tensor)
                dist.broadcast(parameter.data, dist.get_global_rank(group, owner), group=group)

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank.

        Each element is counted on the first rank that has it: the weight of a norm is on all
        tensor-parallel ranks, a tied embedding on two stages, everything on data-parallel ranks.
        """
        counted = [
            self._gradient(name)
            for name in self._parameters
            if self._weights.first_copy(self._tensors[name])
        ]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            square += torch.stack(torch._foreach_norm(counted, 2)).double().square().sum()
        dist.all_reduce(square)
        return square.sqrt()

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors of this rank that exist: moments, and float32 copies of parameters."""
        yield from self.existing_moments()
        yield from (m for name, m in self.masters.items() if m is not self._parameters[name])

    # Checkpoints

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return moment -> parameter -> tensor, of what this rank has; zeros before a step."""
        found: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        for key, tensor in self.tensors().items():
            moment, name = key.split(".", 1)
            found[moment][name] = tensor
        return found

    def writes(self, tensor: OwnTensor) -> bool:
        """Whether this rank writes the state of a tensor into a checkpoint."""
        if self._owners[tensor.name] is None:
            return self._weights.first_copy(tensor)
        return tensor.counted and self.owns(tensor)
