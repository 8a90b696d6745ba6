"""The training engine over FSDP2 (`fully_shard`): one rank or many, CPU with gloo or accelerators.

consumes      a batch's rows of this rank
waits for     the other ranks of the group, in every method (same method, same order)
produces      numbers per response token; or one optimizer step
unblocked by  all ranks having called; a rank without rows computes filler so that none waits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from quadriga.checkpoint.hf_export import export_hf
from quadriga.checkpoint.rank_state import load_rank_state, save_rank_state
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.base import Batch, LossFn, Outputs, TrainEngine
from quadriga.engines.micro_batches import (
    check_fields,
    filler_batch,
    plan_micro_batches,
    take_rows,
)
from quadriga.engines.optimizer import ShardedAdamW
from quadriga.engines.schedule import check_schedule
from quadriga.engines.sharding import SMALLEST_UNIT, shard_model, units
from quadriga.engines.token_model import Head, TokenModel
from quadriga.errors import ConfigError
from quadriga.models.loading import load_causal_lm, load_value_model
from quadriga.parallel.device import compute_dtype
from quadriga.parallel.distributed import (
    init_distributed,
    local_device,
    max_over_ranks,
    rank,
    sum_metrics_over_ranks,
    sum_over_ranks,
    world_size,
)
from quadriga.parallel.mesh import SHARD, data_parallel_mesh

_CPU = torch.device("cpu")
_PARAMETERS = "parameters"
_MOMENTS = "moments"


class FSDPEngine:
    """A causal language model or a value model, sharded over the ranks. See `TrainEngine`.

    `optim` None: a frozen model (reference policy); its parameters are held in the compute dtype.
    With an optimizer, parameters are float32 at least, so that small steps are not rounded away,
    and only the compute is in `engine.dtype`.
    Raises `ModelError` for a folder that is not a model, `ConfigError` for settings in conflict.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None = None,
        *,
        head: Head = "lm",
        device: str | torch.device = "cpu",
        total_steps: int | None = None,
        packed: bool | None = None,
        smallest_unit: int = SMALLEST_UNIT,
    ) -> None:
        self.config = engine
        self.model_config = model
        self.device = local_device(device)
        if optim is not None:
            total_steps = total_steps if optim.total_steps is None else optim.total_steps
            check_schedule(optim, total_steps)
        init_distributed(self.device.type)
        mesh = data_parallel_mesh(self.device, engine.fsdp_size)
        dtype = compute_dtype(engine.dtype, self.device)
        self.module: Any = _load(  # a PreTrainedModel, an FSDPModule too once it is sharded
            model, head, dtype, trained=optim is not None
        )
        self.module.to(self.device)
        self._tokens = TokenModel(
            self.module,
            head,
            self.device,
            packed=packed,
            fused=engine.fused_head,
            tokens=engine.max_tokens_per_micro_batch,
        )
        self._tied = _tied_names(self.module)
        self._kept_buffers = set(self.module.state_dict()) - set(_parameter_names(self.module))
        shard_model(
            self.module,
            mesh,
            compute_dtype=dtype,
            reduce_dtype=compute_dtype(engine.reduce_dtype, self.device),
            reshard_after_forward=engine.reshard_after_forward,
            smallest_unit=smallest_unit,
        )
        self._units = units(self.module)
        self.optimizer: ShardedAdamW | None = None
        if optim is not None:
            self.optimizer = ShardedAdamW(
                self.module.named_parameters(),
                optim,
                total_steps,
                shard_group=mesh.get_group(SHARD),
            )
        self._away: set[str] = set()
        if engine.param_offload:
            self._send_away(_PARAMETERS)
        if engine.optimizer_offload:
            self._send_away(_MOMENTS)

    # Compute

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int | None = None,
    ) -> Outputs:
        parts = self._plan(batch, micro_batch_size)
        shape = batch["response_mask"].shape
        outputs: Outputs = {}
        with self._in_use(_PARAMETERS), torch.no_grad():
            for rows in parts:
                micro = filler_batch() if rows is None else take_rows(batch, rows, _CPU)
                found = self._tokens(micro, temperature=temperature, entropy=entropy)
                for name, values in found.items():
                    whole = outputs.setdefault(name, torch.zeros(shape))
                    if rows is not None:
                        whole[rows] = values.float().to(whole.device)
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
    ) -> dict[str, float]:
        if self.optimizer is None:
            raise ConfigError("this engine has no optimizer: it was built with optim=None")
        parts = self._plan(mini_batch, micro_batch_size)
        totals: dict[str, float] = {}
        with self._in_use(_PARAMETERS, _MOMENTS), _beside(reference) as ref:
            compute = partial(self._tokens, temperature=temperature, entropy=entropy, reference=ref)
            for index, rows in enumerate(parts):
                self._synchronise_gradients(index == len(parts) - 1)
                self._accumulate(mini_batch, rows, loss_fn, totals, compute)
            norm, rate = self.optimizer.step()
        metrics = sum_metrics_over_ranks(totals)
        metrics |= {
            "grad_norm": norm,
            "lr": rate,
            "skipped_steps": float(self.optimizer.skipped),
            "micro_batches": float(len(parts)),
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
        if rows is None:
            outputs = compute(filler_batch())
            (torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0).backward()
            return
        outputs = compute(take_rows(mini_batch, rows, _CPU))
        loss, metrics = loss_fn(outputs, take_rows(mini_batch, rows, self.device))
        loss.backward()
        for name, value in {"loss": loss.detach(), **metrics}.items():
            totals[name] = totals.get(name, 0.0) + float(value)

    def _plan(self, batch: Batch, size: int | None) -> list[Tensor | None]:
        """Row indices of each micro-batch; None where only other ranks have rows left.

        All ranks get equally many, since FSDP's collectives must match, and at least one.
        """
        check_fields(batch)
        if size is None and not self.config.use_dynamic_bsz:
            size = max(len(batch["input_ids"]), 1)
        parts = plan_micro_batches(
            batch,
            size=size,
            max_tokens=self.config.max_tokens_per_micro_batch,
            share_prompts=self._tokens.packed,
        )
        count = max_over_ranks(max(len(parts), 1), self.device)
        return [*parts, *[None] * (count - len(parts))]

    def _synchronise_gradients(self, last: bool) -> None:
        self.module.set_requires_gradient_sync(last)
        self.module.set_is_last_backward(last)
        self.module.set_reshard_after_backward(last)

    def global_count(self, count: float | Tensor) -> float:
        return sum_over_ranks([float(count)], self.device)[0]

    # Weights

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        for name, full in self._full_weights():
            yield name, full
            for alias in self._tied.get(name, ()):
                yield alias, full

    def _full_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._in_use(_PARAMETERS):
            for name, tensor in self._weights():
                yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self.module.named_buffers():
            if name in self._kept_buffers:
                yield name, buffer

    def _state(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in self._weights()}
        if self.optimizer is not None:
            moments = self.optimizer.tensors()
            tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        return tensors

    def save(self, folder: str | Path) -> None:
        steps = {}
        if self.optimizer is not None:
            steps = {"step": self.optimizer.step_count, "skipped": self.optimizer.skipped}
        save_rank_state(folder, self._state(), steps, rank=rank(), world_size=world_size())

    def load(self, folder: str | Path) -> None:
        with self._in_use(_PARAMETERS, _MOMENTS):
            state = self._state()
            steps = load_rank_state(folder, state, rank=rank())
            if self.optimizer is not None:
                self.optimizer.load_tensors(
                    {n.removeprefix("optimizer."): t for n, t in state.items()},
                    step_count=steps["step"],
                    skipped=steps["skipped"],
                )

    def save_hf(self, folder: str | Path) -> None:
        export_hf(
            folder,
            self._full_weights(),
            self.module.config,
            generation=getattr(self.module, "generation_config", None),
            tokenizer_path=self.model_config.tokenizer_path or self.model_config.path,
            trust_remote_code=self.model_config.trust_remote_code,
            write=rank() == 0,
        )

    # Memory

    def offload(self) -> None:
        self._send_away(_PARAMETERS)
        self._send_away(_MOMENTS)

    def reload(self) -> None:
        self._bring_back(_PARAMETERS)
        self._bring_back(_MOMENTS)

    @contextmanager
    def _scoring(self) -> Iterator[TokenModel]:
        """The model for another engine's use, its weights on the device meanwhile."""
        with self._in_use(_PARAMETERS):
            yield self._tokens

    @contextmanager
    def _in_use(self, *parts: str) -> Iterator[None]:
        """Bring what a method needs to the device, and afterwards leave all as it was."""
        borrowed = [part for part in parts if part in self._away]
        for part in borrowed:
            self._bring_back(part)
        try:
            yield
        finally:
            self._reshard()
            for part in borrowed:
                self._send_away(part)

    def _reshard(self) -> None:
        """Leave the gathered weights: named_parameters() is then the shards, and a later change
        of these is seen by the next forward."""
        for unit in self._units:
            unit.reshard()

    def _send_away(self, part: str) -> None:
        if self.device.type != "cpu" and part not in self._away:
            self._move(part, _CPU)
            self._away.add(part)

    def _bring_back(self, part: str) -> None:
        if part in self._away:
            self._move(part, self.device)
            self._away.remove(part)

    def _move(self, part: str, device: torch.device) -> None:
        if part == _PARAMETERS:
            self.module.to(device)
        elif self.optimizer is not None:
            self.optimizer.move(device)


@contextmanager
def _beside(reference: TrainEngine | None) -> Iterator[TokenModel | None]:
    """The reference's model while a step of the policy needs it."""
    if reference is None:
        yield None
        return
    if not isinstance(reference, FSDPEngine):
        raise ConfigError(
            "KL over the vocabulary needs policy and reference in engines of one kind, but the "
            f"reference's is {type(reference).__name__}; set ref.engine.name=fsdp"
        )
    with reference._scoring() as tokens:
        yield tokens


def _load(model: ModelConfig, head: Head, dtype: torch.dtype, *, trained: bool) -> Any:
    if trained and dtype.itemsize < 4:
        dtype = torch.float32
    loader = load_causal_lm if head == "lm" else load_value_model
    module: Any = loader(
        model.path,
        dtype=dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
    module.config.architectures = [type(module).__name__]  # sharding renames the class
    _switch_off_dropout(module)
    if model.gradient_checkpointing and trained:
        _switch_on_checkpointing(module)
        return module.train()
    return module.eval()


def _switch_on_checkpointing(module: PreTrainedModel) -> None:
    new_name = getattr(module, "activation_checkpointing_enable", None)
    (new_name or module.gradient_checkpointing_enable)({"use_reentrant": False})


def _switch_off_dropout(module: nn.Module) -> None:
    """A log-probability has to be a function of the weights: the first ratio is exactly 1."""
    parts: Iterable[Any] = module.modules()
    for part in parts:
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """First name of a parameter -> its other names (an output layer tied to the embedding)."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values()}
