"""One optimizer step over the parameter shards of a rank: clip, update, count.

The learning rate is a pure function of the step, so a resumed run needs only the step. Which update
rule has which parameter, and the bytes of its state for the memory plan, follow from the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quadriga.config.schema import LrSchedulerName, OptimConfig, OptimizerName
from quadriga.engines.optimizers import check_optimizer_packages
from quadriga.engines.optimizers.rules import (
    MOMENTS,
    SMALLEST_BLOCK,
    SMALLEST_PARAMETER,
    AdamW,
    AdamW8bit,
    Muon,
    UpdateRule,
    block_size,
    is_first_of_tensor_ranks,
    local_shard,
)
from quadriga.errors import CheckpointError, ConfigError, NonFiniteError
from quadriga.observability.jsonl import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIMIZER = "optimizer"
"""Key of the optimizer's name in a checkpoint."""
SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Key of the steps that were skipped directly before a checkpoint."""
UPDATES = "updates"
"""Key of parameter -> updates, for those that had no gradient in some of the steps."""


class ShardedOptimizer:
    """Update rules with clipping by the global gradient norm and a learning rate schedule.

    If the gradient norm is not finite, the step is skipped: weights and moments do not change,
    `skipped` is incremented, and the schedule continues. More than `max_skipped_steps` of them in a
    row are an error. The norm is the same on all ranks, so all ranks skip, or fail, together.

    Args:
        rules: each updates some of the parameters; no two update the same.
        total_steps: optimizer steps of the run, for the schedule.
        shard_group: the ranks that together hold one copy of the parameters; ranks of tensor
            parallelism can hold equal parts.
        device: the device of the collectives.
    """

    def __init__(
        self,
        rules: Sequence[UpdateRule],
        config: OptimConfig,
        total_steps: int | None,
        *,
        shard_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.rules = rules
        self.step_count = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        # A parameter without a gradient in a step is not updated, so each has a count of its own.
        self._updates = {name: 0 for rule in rules for name, _ in rule.named}
        self._shard_group = shard_group
        self._device = device

    def step(self) -> tuple[float, float]:
        """Clip the gradients, update the weights, and clear the gradients.

        Returns:
            (gradient norm before clipping, learning rate).

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        rate = learning_rate(self.step_count, self.config, self.total_steps)
        gradients = [
            [None if p.grad is None else local_shard(p.grad) for _, p in rule.named]
            for rule in self.rules
        ]
        existing = [g for of_rule in gradients for g in of_rule if g is not None]
        norm = self._global_norm(list(self._counted(gradients)))
        if norm.isfinite():
            limit = self.config.grad_clip
            if limit > 0 and float(norm) > limit:
                torch._foreach_mul_(existing, float(limit / (norm + 1e-6)))
            for rule, of_rule in zip(self.rules, gradients, strict=True):
                rule.update(of_rule, rate)
                for (name, _), gradient in zip(rule.named, of_rule, strict=True):
                    self._updates[name] += gradient is not None
            self._skipped_in_a_row = 0
        else:
            self.skipped += 1
            self._skipped_in_a_row += 1
        self.step_count += 1
        for rule in self.rules:
            for _, parameter in rule.named:
                parameter.grad = None
        self._check_skipped(float(norm))
        return float(norm), rate

    def _check_skipped(self, norm: float) -> None:
        limit = self.config.max_skipped_steps
        if limit is not None and self._skipped_in_a_row > limit:
            raise NonFiniteError(
                f"the norm of the gradient was not finite in {self._skipped_in_a_row} optimizer "
                f"steps in a row (the last one: {norm}), and optim.max_skipped_steps={limit}; the "
                "weights have not changed since. Lower optim.lr, check the rewards and the loss, "
                "or set max_skipped_steps to null for no bound",
                step=self.step_count,
            )

    def _counted(self, gradients: Sequence[Sequence[Tensor | None]]) -> Iterator[Tensor]:
        """Yield the gradients that this rank adds to the norm.

        Ranks of tensor parallelism that have the same gradient count it once.
        """
        for rule, of_rule in zip(self.rules, gradients, strict=True):
            for (_, parameter), gradient in zip(rule.named, of_rule, strict=True):
                if gradient is not None and is_first_of_tensor_ranks(parameter):
                    yield gradient

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, the same on every rank."""
        # Three ranks hold the shards of one gradient, with the local norms 1, 2 and 2:
        #
        #               rank 0   rank 1   rank 2
        #   norm²          1        4        4      all-reduce (sum): 9, so the norm is 3 everywhere
        #   grad_clip 1.5: every rank multiplies its shard by 1.5 / 3 = 0.5
        #
        # Norms cannot be summed (1 + 2 + 2 = 5), and clipping by the local norm would scale ranks
        # 1 and 2 only and turn the gradient. With hybrid sharding every replica holds the reduced
        # gradient, so only the ranks of one replica (`shard_group`) take part. The sum is in
        # float64, so that its rounding does not depend on how the gradient is sharded.
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if gradients:
            wide = torch.promote_types(gradients[0].dtype, torch.float32)
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide))
            # Gradients can be in host memory, but collectives are of the device.
            square = norms.double().square().sum().to(self._device)
        if self._shard_group is not None and dist.get_world_size(self._shard_group) > 1:
            dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `exp_avg.<parameter>` and so on, sharded like the parameters.

        Before the first step, the moments are zeros.
        """
        return {name: tensor for rule in self.rules for name, tensor in rule.tensors().items()}

    def scalars(self) -> dict[str, object]:
        """Return what a checkpoint holds beside the tensors: counts, and which optimizer it is."""
        made = self.step_count - self.skipped
        return {
            "step": self.step_count,
            "skipped": self.skipped,
            SKIPPED_IN_A_ROW: self._skipped_in_a_row,
            UPDATES: {name: n for name, n in self._updates.items() if n != made},
            OPTIMIZER: self.config.name,
        }

    def check_scalars(self, scalars: Mapping[str, object], folder: str | Path) -> None:
        """Check that the state in a checkpoint is of this optimizer.

        Raises:
            CheckpointError: it is of another one.
        """
        saved = scalars.get(OPTIMIZER, "adamw")  # before there was a choice
        if saved != self.config.name:
            raise CheckpointError(
                f"the optimizer state in {folder} is of optim.name={saved}, but the settings have "
                f"optim.name={self.config.name}; set optim.name={saved}, or start a new run from "
                "the exported weights",
                path=str(folder),
            )

    def load(self, state: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Set the state, as `tensors` returns it, and the counts, as `scalars` returns them.

        Values of `scalars` that older checkpoints have not are those of a run without skipped
        steps, in which each parameter was updated in every step.
        """
        self.step_count, self.skipped = scalars["step"], scalars["skipped"]
        self._skipped_in_a_row = scalars.get(SKIPPED_IN_A_ROW, 0)
        made, updates = self.step_count - self.skipped, scalars.get(UPDATES, {})
        self._updates = {name: updates.get(name, made) for name in self._updates}
        for rule in self.rules:
            rule.load_tensors(state, self._updates)

    def existing_moments(self) -> Iterator[Tensor]:
        """Yield the tensors of the state that exist on this rank: none before the first step."""
        for rule in self.rules:
            yield from rule.existing()


SCHEDULES: dict[LrSchedulerName, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Name -> function from progress in [0, 1] after the warmup to a factor of the peak rate."""


def learning_rate(step: int, optim: OptimConfig, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    During warmup the rate rises linearly. Its first value is above 0, and it reaches the peak
    `optim.lr` at step `lr_warmup_steps`. Then the schedule falls to `min_lr_ratio` of the peak,
    which it reaches at the last step.
    """
    # lr 1, two warmup steps, six steps in total, min_lr_ratio 0:
    #
    #   step        0     1     2     3     4     5     6 …
    #   warmup     1/3   2/3
    #   progress                0    1/3   2/3    1     1      (step − 2) / (6 − 1 − 2)
    #   linear     .33   .67    1    .67   .33    0     0
    #   cosine     .33   .67    1    .75   .25    0     0
    warmup = optim.lr_warmup_steps
    if step < warmup:
        return optim.lr * (step + 1) / (warmup + 1)
    if optim.lr_scheduler == "constant" or total_steps is None:
        return optim.lr
    progress = (step - warmup) / max(total_steps - 1 - warmup, 1)
    factor = SCHEDULES[optim.lr_scheduler](min(progress, 1.0))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * factor)


def check_schedule(optim: OptimConfig, total_steps: int | None) -> None:
    """Check that the schedule has what it needs.

    Raises:
        ConfigError: the schedule needs the number of steps, and it is not known.
    """
    if optim.lr_scheduler != "constant" and total_steps is None:
        raise ConfigError(
            f"lr_scheduler {optim.lr_scheduler!r} needs the number of optimizer steps; set "
            "optim.total_steps"
        )


_FITTING: dict[OptimizerName, str] = {
    "adamw": "all of them",
    "adamw_8bit": f"those with {SMALLEST_PARAMETER} elements or more, in rows of a multiple of "
    f"{SMALLEST_BLOCK}",
    "muon": "the matrices of hidden layers",
}
"""Optimizer → the parameters that it is for."""
_NOT_HIDDEN = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def rule_of_each(model: PreTrainedModel, name: OptimizerName) -> dict[str, OptimizerName]:
    """Return parameter → the rule that updates it, for each trained parameter of `model`.

    With `adamw_8bit` and `muon`, the parameters that they are not made for have `adamw`.
    """
    hidden = _hidden_matrices(model) if name == "muon" else set()
    found: dict[str, OptimizerName] = {}
    for key, parameter in model.named_parameters():
        fits = name == "adamw_8bit" and block_size(parameter.shape) is not None
        if parameter.requires_grad:
            found[key] = name if fits or id(parameter) in hidden else "adamw"
    return found


def check_fits_parameters(model: PreTrainedModel, name: OptimizerName, key: str = "optim") -> None:
    """Check that the optimizer fits a trained parameter of `model`. `key`: its section.

    Raises:
        ConfigError: it fits none.
    """
    names = rule_of_each(model, name)
    if name not in names.values():
        model_class = type(model).__name__.removeprefix("FSDP")  # put before it by `fully_shard`
        raise ConfigError(
            f"{key}.name={name} fits none of the {len(names)} trained parameters of "
            f"{model_class} ({_FITTING[name]}); set {key}.name=adamw",
            key=f"{key}.name",
        )


def _hidden_matrices(model: PreTrainedModel) -> set[int]:
    """Return the ids of the weights of hidden linear layers, experts included.

    Embeddings, output layers, norms, convolutions and biases are not among them.
    """
    from quadriga.models.loading import VALUE_HEAD

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # not annotated there
    outputs = (head, getattr(model, VALUE_HEAD, None))
    hidden: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        unsuitable = isinstance(module, _NOT_HIDDEN) or any(module is o for o in outputs)
        for name, parameter in module.named_parameters(recurse=False):
            # `weight` [A, B] of a linear layer, or [E, A, B] of E experts under any name. Other
            # parameters with two dimensions are biases of experts, states of a recurrence, …
            matrix = (parameter.dim() == 2 and name == "weight") or (
                parameter.dim() == 3 and "bias" not in name
            )
            suitable = matrix and not unsuitable and min(parameter.shape[-2:]) > 1
            (hidden if suitable else others).add(id(parameter))
    return hidden - others  # a tied output layer is an embedding


def build_optimizer(
    model: PreTrainedModel,
    config: OptimConfig,
    total_steps: int | None,
    *,
    shard_group: dist.ProcessGroup | None,
    device: torch.device,
) -> ShardedOptimizer:
    """Build the optimizer that `config.name` names, for the trained parameters of `model`.

    Raises:
        ConfigError: a package is missing, or the optimizer fits no parameter.
    """
    check_optimizer_packages("optim", config)
    check_fits_parameters(model, config.name)
    names = rule_of_each(model, config.name)
    trained = [(name, p) for name, p in model.named_parameters() if name in names]
    rules: list[UpdateRule] = []
    for rule in dict.fromkeys(names.values()):
        named = [(name, p) for name, p in trained if names[name] == rule]
        if rule == "muon":
            rules.append(Muon(named, config, shard_group=shard_group, device=device))
        else:
            rules.append(AdamW8bit(named, config) if rule == "adamw_8bit" else AdamW(named, config))
    return ShardedOptimizer(rules, config, total_steps, shard_group=shard_group, device=device)


def state_bytes(rule: OptimizerName, shape: Sequence[int], rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the state of `rows` rows of a parameter.

    Args:
        shape: of the whole parameter.
        dtype: of the parameter.
    """
    # A matrix [1024, 4096] in float32: AdamW has two moments of 16 MiB. Muon has one. With 8 bits
    # a moment has 4 MiB of codes, and 16 scales of 4 bytes in each of 1024 rows: 64 KiB.
    row = math.prod(shape[1:])
    if rule == "muon":
        return rows * row * dtype.itemsize
    block = block_size(shape) if rule == "adamw_8bit" else None
    if block is None:
        return len(MOMENTS) * rows * row * dtype.itemsize
    return len(MOMENTS) * rows * (row + row // block * torch.float32.itemsize)
