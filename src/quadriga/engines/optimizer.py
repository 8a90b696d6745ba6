"""AdamW over the parameter shards of this rank.

FSDP2 represents parameters and gradients as DTensors. AdamW is elementwise, so each rank updates
its own parameter shards as plain tensors. The numbers are the same, and there is no DTensor
dispatch for each operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quadriga.config.schema import OptimConfig
from quadriga.engines.schedule import learning_rate
from quadriga.errors import NonFiniteError

MomentName = Literal["exp_avg", "exp_avg_sq"]
_MOMENTS: tuple[MomentName, ...] = ("exp_avg", "exp_avg_sq")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's parameter shard of a DTensor (same storage), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedAdamW:
    """AdamW with clipping by the global gradient norm and a learning rate schedule.

    If the gradient norm is not finite, the step is skipped: weights and moments do not change,
    `skipped` is incremented, and the schedule continues. More than `max_skipped_steps` of them in a
    row are an error. The norm is the same on all ranks, so all ranks skip, or fail, together.

    Args:
        parameters: (name, parameter) pairs. Frozen parameters are left out.
        total_steps: optimizer steps of the run, for the schedule.
        shard_group: the ranks that together hold one copy of the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        total_steps: int | None,
        *,
        shard_group: dist.ProcessGroup | None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.step_count = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._shard_group = shard_group
        self._named = [(name, p) for name, p in parameters if p.requires_grad]
        self._shards = [nn.Parameter(local_shard(p.detach())) for _, p in self._named]
        self._adamw = torch.optim.AdamW(
            self._shards,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=all(s.device.type in ("cpu", "cuda") for s in self._shards),
        )

    def step(self) -> tuple[float, float]:
        """Clip the gradients, update the weights, and clear the gradients.

        Returns:
            (gradient norm before clipping, learning rate).

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        rate = learning_rate(self.step_count, self.config, self.total_steps)
        gradients = [None if p.grad is None else local_shard(p.grad) for _, p in self._named]
        norm = self._global_norm([g for g in gradients if g is not None])
        if norm.isfinite():
            self._apply(gradients, norm, rate)
            self._skipped_in_a_row = 0
        else:
            self.skipped += 1
            self._skipped_in_a_row += 1
        self.step_count += 1
        for _, parameter in self._named:
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

    def _apply(self, gradients: list[Tensor | None], norm: Tensor, rate: float) -> None:
        limit = self.config.grad_clip
        if limit > 0 and float(norm) > limit:
            scale = float(limit / (norm + 1e-6))
            torch._foreach_mul_([g for g in gradients if g is not None], scale)
        for shard, (_, parameter), gradient in zip(
            self._shards, self._named, gradients, strict=True
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
        if not gradients:
            return torch.zeros(())
        wide = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=wide))
        square = norms.double().square().sum()
        if self._shard_group is not None and dist.get_world_size(self._shard_group) > 1:
            dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """Return the moments as `exp_avg.<parameter>` and so on, sharded like their parameters.

        Before the first step, the moments are zeros.
        """
        state: dict[str, Tensor] = {}
        for (name, parameter), shard in zip(self._named, self._shards, strict=True):
            for key in _MOMENTS:
                moment = self._adamw.state[shard].get(key)
                moment = torch.zeros_like(shard.detach()) if moment is None else moment
                state[f"{key}.{name}"] = _sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: dict[str, Tensor], *, step_count: int, skipped: int) -> None:
        """Set the moments, as `tensors` returns them, and the counts that belong to them."""
        self.step_count, self.skipped = step_count, skipped
        # AdamW's own step count drives the bias correction, so it counts the steps that were made.
        # The fused kernel needs that count on the device of the shard, the other one on the CPU.
        steps = torch.tensor(float(step_count - skipped))
        on_device = bool(self._adamw.defaults["fused"])
        for (name, _), shard in zip(self._named, self._shards, strict=True):
            moments = {key: local_shard(state[f"{key}.{name}"]) for key in _MOMENTS}
            self._adamw.state[shard] = {
                "step": steps.to(shard.device if on_device else "cpu", copy=True),
                **moments,
            }

    def existing_moments(self) -> Iterator[Tensor]:
        """Yield the moments of this rank that exist: none before the first step."""
        for moments in self._adamw.state.values():
            yield from (moments[key] for key in _MOMENTS)


def _sharded_like(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return `shard` as a DTensor with the mesh and placements of `parameter`, if it is one."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
