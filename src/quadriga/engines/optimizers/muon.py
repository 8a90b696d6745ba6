"""Muon: the update of a hidden matrix is its momentum with all singular values near 1.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale
of J. Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982, section 2.2):

    m ← μ m + (1 − μ) g
    u = (1 − μ) g + μ m                                   Nesterov
    w ← w − η λ w − η · 0.2 √max(A, B) · NewtonSchulz(u)  for w of shape [A, B]

An orthogonal matrix has the root mean square 1 / √max(A, B), so the update has 0.2, which is about
that of AdamW. Learning rate and weight decay of AdamW therefore hold for Muon too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers.newton_schulz import newton_schulz
from quadriga.engines.optimizers.rule import Named, local_shard, sharded_like
from quadriga.engines.optimizers.whole_matrices import RowShard, apply_to_whole_matrices

MOMENTUM = "momentum"
DEFAULT_MOMENTUM = 0.95
RMS_OF_ADAMW = 0.2


class Muon:
    """Muon over parameter shards of hidden matrices. See `UpdateRule`.

    A matrix [A, B] is sharded by rows, and Newton-Schulz needs all of them (`whole_matrices`). The
    parameter [E, A, B] of E experts is E matrices. Its shards hold whole experts, so each rank
    computes its own.

    Args:
        shard_group: the ranks that together hold one copy of the parameters.
        device: where Newton-Schulz runs: in bfloat16 on an accelerator, in the dtype of the
            parameters on a CPU.
    """

    def __init__(
        self,
        named: Named,
        config: OptimConfig,
        *,
        shard_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.named = named
        self._decay = config.weight_decay
        self._momentum = DEFAULT_MOMENTUM if config.momentum is None else config.momentum
        self._group = shard_group
        self._device = device
        self._moments: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None], rate: float) -> None:
        # FSDP reduces the gradients of a unit together, so a gradient exists on all ranks or none.
        changed = [i for i, gradient in enumerate(gradients) if gradient is not None]
        for chosen in self._rounds(changed):
            directions = [self._direction(i, gradients[i]) for i in chosen]
            for index, direction in zip(chosen, self._orthogonal(chosen, directions), strict=True):
                _, parameter = self.named[index]
                shard = local_shard(parameter.detach())
                scale = RMS_OF_ADAMW * math.sqrt(max(parameter.shape[-2:]))
                shard.mul_(1 - rate * self._decay)
                shard.add_(direction.to(shard.device, shard.dtype), alpha=-rate * scale)

    def _rounds(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Yield parameters that are updated at once: as many matrices as ranks, or the experts of
        one layer. Matrices of about the same size go together, so that the ranks end together."""
        ranks = 1 if self._group is None else dist.get_world_size(self._group)
        matrices = [i for i in indices if self.named[i][1].dim() == 2]
        matrices.sort(key=lambda i: -self.named[i][1].numel())
        yield from (matrices[i : i + ranks] for i in range(0, len(matrices), ranks))
        yield from ([i] for i in indices if self.named[i][1].dim() == 3)

    def _direction(self, index: int, gradient: Tensor | None) -> Tensor:
        """Update the momentum, and return the step before it is made orthogonal."""
        assert gradient is not None
        name, parameter = self.named[index]
        gradient = gradient.to(parameter.dtype)
        moment = self._moments.get(name)
        if moment is None:
            moment = self._moments[name] = torch.zeros_like(gradient)
        moment.lerp_(gradient, 1 - self._momentum)
        dtype = gradient.dtype if self._device.type == "cpu" else torch.bfloat16
        return gradient.lerp(moment, self._momentum).to(self._device, dtype)

    def _orthogonal(self, chosen: Sequence[int], directions: Sequence[Tensor]) -> list[Tensor]:
        if directions[0].dim() == 3:
            return [newton_schulz(direction) for direction in directions]
        totals = [self.named[index][1].shape[0] for index in chosen]
        shards = [RowShard(*pair) for pair in zip(directions, totals, strict=True)]
        return apply_to_whole_matrices(newton_schulz, shards, self._group)

    def tensors(self) -> dict[str, Tensor]:
        state = {}
        for name, parameter in self.named:
            moment = self._moments.get(name)
            if moment is None:
                moment = torch.zeros_like(local_shard(parameter.detach()))
            state[f"{MOMENTUM}.{name}"] = sharded_like(moment, parameter)
        return state

    def load_tensors(self, state: Mapping[str, Tensor], updates: Mapping[str, int]) -> None:
        for name, _ in self.named:
            self._moments[name] = local_shard(state[f"{MOMENTUM}.{name}"])

    def existing(self) -> Iterator[Tensor]:
        yield from self._moments.values()
