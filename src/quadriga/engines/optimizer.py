"""AdamW over this rank's shards.

FSDP2 gives parameters and gradients as DTensors. AdamW is elementwise, so each rank steps its own
local shards as plain tensors: the same numbers, without a DTensor dispatch per operator.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quadriga.config.schema import OptimConfig
from quadriga.engines.schedule import learning_rate

_STATE = ("exp_avg", "exp_avg_sq")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor (shared storage), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedAdamW:
    """AdamW with global-norm clipping and a schedule.

    A step whose gradient norm is not finite leaves weights and moments as they were; it is
    counted in `skipped`, and the schedule moves on.
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
        self._shard_group = shard_group
        self._named = [(name, p) for name, p in parameters if p.requires_grad]
        self._shards = [nn.Parameter(local(p.detach())) for _, p in self._named]
        self._adamw = torch.optim.AdamW(
            self._shards,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=all(s.device.type in ("cpu", "cuda") for s in self._shards),
        )

    def step(self) -> tuple[float, float]:
        """Clip, step, clear the gradients. Returns (gradient norm before clipping, rate)."""
        rate = learning_rate(self.step_count, self.config, self.total_steps)
        gradients = [None if p.grad is None else local(p.grad) for _, p in self._named]
        norm = self._global_norm([g for g in gradients if g is not None])
        if norm.isfinite():
            self._apply(gradients, norm, rate)
        else:
            self.skipped += 1
        self.step_count += 1
        for _, parameter in self._named:
            parameter.grad = None
        return float(norm), rate

    def _apply(self, gradients: list[Tensor | None], norm: Tensor, rate: float) -> None:
        limit = self.config.grad_clip
        if limit > 0 and float(norm) > limit:
            scale = float(limit / (norm + 1e-6))
            torch._foreach_mul_([g for g in gradients if g is not None], scale)
        for shard, (_, parameter), gradient in zip(
            self._shards, self._named, gradients, strict=True
        ):
            shard.data = local(parameter.detach())  # offloading moves the storage
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for shard in self._shards:
            shard.grad = None

    def _global_norm(self, gradients: list[Tensor]) -> Tensor:
        if not gradients:
            return torch.zeros(())
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        square = norms.double().square().sum()
        if self._shard_group is not None and dist.get_world_size(self._shard_group) > 1:
            dist.all_reduce(square, group=self._shard_group)
        return square.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """Moments as `exp_avg.<parameter>` …, sharded like their parameters.

        Moments that do not exist yet (no step so far) come as zeros.
        """
        state: dict[str, Tensor] = {}
        for (name, parameter), shard in zip(self._named, self._shards, strict=True):
            for key in _STATE:
                moment = self._adamw.state[shard].get(key)
                moment = torch.zeros_like(shard.detach()) if moment is None else moment
                state[f"{key}.{name}"] = _like(moment, parameter)
        return state

    def load_tensors(self, state: dict[str, Tensor], *, step_count: int, skipped: int) -> None:
        """Take moments as `tensors` gives them, and the counts that belong to them."""
        self.step_count, self.skipped = step_count, skipped
        steps = float(step_count - skipped)
        for (name, _), shard in zip(self._named, self._shards, strict=True):
            moments = {key: local(state[f"{key}.{name}"]) for key in _STATE}
            self._adamw.state[shard] = {"step": torch.tensor(steps), **moments}

    def move(self, device: torch.device) -> None:
        """Move the moments (not the parameters)."""
        for moments in self._adamw.state.values():
            for key in _STATE:
                moments[key] = moments[key].to(device, non_blocking=True)


def _like(shard: Tensor, parameter: Tensor) -> Tensor:
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
