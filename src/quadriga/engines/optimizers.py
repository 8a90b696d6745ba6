"""One optimizer step over the parameter shards of a rank: clip, update, count.

`ShardedOptimizer` clips, skips steps that are not finite, follows the schedule, and saves its
state. The learning rate is a pure function of the step, so a resumed run needs only the step.

AdamW (arXiv 1711.05101) is elementwise, so each rank updates its own shards. The numbers are those
of whole tensors, and there is no DTensor dispatch for each operator.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from quadriga.config.schema import LrSchedulerName, OptimConfig
from quadriga.errors import ConfigError, NonFiniteError
from quadriga.observability.jsonl import JsonObject
from quadriga.parallel.model_ranks import TENSOR

Named = Sequence[tuple[str, nn.Parameter]]
"""(name, parameter) pairs. A parameter is a DTensor after sharding."""


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's parameter shard of a DTensor (same storage), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_of_tensor_ranks(tensor: Tensor) -> bool:
    """Return whether no lower rank of tensor parallelism has the same elements of a DTensor."""
    if not isinstance(tensor, DTensor):
        return True
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names or ()
    if TENSOR not in names or not tensor.placements[names.index(TENSOR)].is_replicate():
        return True
    return mesh.get_local_rank(TENSOR) == 0


def sharded_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return `shard` as a DTensor with the mesh and placements of `parameter`, if it is one."""
    if not isinstance(parameter, DTensor):
        return shard
    stride = torch.empty(parameter.shape, device="meta").stride()
    # `DTensor.from_local` would copy a shard in host memory to the device of the mesh.
    meta = TensorMeta(parameter.shape, stride, shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # of torch


MomentName = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: tuple[MomentName, ...] = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Torch's AdamW, fused where the device has the kernel.

    A rule updates the parameters that it was built with, `named`, in their order.
    """

    def __init__(self, named: Named, config: OptimConfig) -> None:
        self.named = named
        self._shards = [nn.Parameter(local_shard(p.detach())) for _, p in named]
        self._adamw = torch.optim.AdamW(
            self._shards, lr=config.lr, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay,
            fused=all(s.device.type in ("cpu", "cuda") for s in self._shards),
        )  # fmt: skip

    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        """Update the parameters. All ranks that share a copy of the parameters call it together.

        Args:
            gradients: of this rank's shards, in the order of `named`. None: a parameter that the
                loss does not depend on, which does not change.
            rate: the learning rate of this step.
        """
        for shard, (_, parameter), gradient in zip(
            self._shards, self.named, gradients, strict=True
        ):
            # FSDP may replace a parameter's storage before its first forward pass, so the
            # optimizer's view of it is renewed before every step.
            shard.data = local_shard(parameter.detach())
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for shard in self._shards:
            shard.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as `<kind>.<parameter>`, sharded like the parameters; zeros at first."""
        state: dict[str, Tensor] = {}
        for (name, parameter), shard in zip(self.named, self._shards, strict=True):
            # `get`: torch's dict would make an entry without moments for a missing shard.
            moments = self._adamw.state.get(shard)
            for key in MOMENTS:
                moment = moments[key] if moments else torch.zeros_like(shard.detach())
                state[f"{key}.{name}"] = sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        """Set the state, as `tensors` returns it.

        `updates`: parameter -> the number of its updates, those without a gradient left out.
        """
        # AdamW's own step count of a parameter drives its bias correction. The fused kernel needs
        # that count on the device of the shard, the other one on the CPU.
        on_device = bool(self._adamw.defaults["fused"])
        for (name, _), shard in zip(self.named, self._shards, strict=True):
            device = shard.device if on_device else "cpu"
            self._adamw.state[shard] = {
                "step": torch.tensor(float(updates[name]), device=device),
                **{key: local_shard(state[f"{key}.{name}"]) for key in MOMENTS},
            }

    def existing(self) -> Iterator[Tensor]:
        """Yield the tensors of the state that exist on this rank: none before the first update."""
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in MOMENTS)


SKIPPED_IN_A_ROW = "skipped_in_a_row"
"""Key of the steps that were skipped directly before a checkpoint."""
LR_SCALE = "lr_scale"
"""Key of the factor of the learning rate that a callback has set."""
UPDATES = "updates"
"""Key of parameter -> updates, for those that had no gradient in some of the steps."""


class ShardedOptimizer:
    """AdamW with clipping by the global gradient norm and a learning rate schedule.

    If the gradient norm is not finite, the step is skipped: weights and moments do not change,
    `skipped` is incremented, and the schedule continues. More than `max_skipped_steps` of them in a
    row are an error. The norm is the same on all ranks, so all ranks skip, or fail, together.

    Args:
        rules: of the parameters that this rank updates; none, if it updates none.
        total_steps: optimizer steps of the run, for the schedule.
        shard_group: the ranks that together hold one copy of the parameters; ranks of tensor
            parallelism can hold equal parts.
        device: the device of the collectives.
    """

    def __init__(
        self,
        rules: Sequence[AdamW],
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
        self.lr_scale = 1.0  # of the learning rate of the schedule; a callback sets it
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
        rate = self.lr_scale * learning_rate(self.step_count, self.config, self.total_steps)
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
        """Return what a checkpoint holds beside the tensors: counts, and the factor of the rate."""
        made = self.step_count - self.skipped
        return {
            "step": self.step_count,
            "skipped": self.skipped,
            SKIPPED_IN_A_ROW: self._skipped_in_a_row,
            UPDATES: {name: n for name, n in self._updates.items() if n != made},
            LR_SCALE: self.lr_scale,
        }

    def load(self, state: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Set the state, as `tensors` returns it, and the counts, as `scalars` returns them.

        Values of `scalars` that older checkpoints have not are those of a run without skipped
        steps, in which each parameter was updated in every step.
        """
        self.step_count, self.skipped = scalars["step"], scalars["skipped"]
        self._skipped_in_a_row = scalars.get(SKIPPED_IN_A_ROW, 0)
        self.lr_scale = scalars.get(LR_SCALE, 1.0)
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
    `optim.lr` at step `lr_warmup_steps`, or after `lr_warmup_ratio` of all steps. Then the schedule
    falls to `min_lr_ratio` of the peak, which it reaches at the last step.
    """
    # lr 1, two warmup steps, six steps in total, min_lr_ratio 0:
    #
    #   step        0     1     2     3     4     5     6 …
    #   warmup     1/3   2/3
    #   progress                0    1/3   2/3    1     1      (step − 2) / (6 − 1 − 2)
    #   linear     .33   .67    1    .67   .33    0     0
    #   cosine     .33   .67    1    .75   .25    0     0
    warmup = optim.lr_warmup_steps or int(optim.lr_warmup_ratio * (total_steps or 0))
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
    if (optim.lr_scheduler != "constant" or optim.lr_warmup_ratio) and total_steps is None:
        raise ConfigError(
            f"lr_scheduler {optim.lr_scheduler!r} and lr_warmup_ratio={optim.lr_warmup_ratio:g} "
            "need the number of optimizer steps; set optim.total_steps"
        )
