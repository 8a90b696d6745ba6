"""One optimizer step over tensor, pipeline, context, expert and data parallel ranks.

Megatron-core's data parallelism has summed the gradients over the ranks with the same parameters.
The update rule and its policy (clipping, steps that are skipped, the schedule) are those of the
FSDP engine. Parameters in 16 bits have a copy in float32, which is updated.

With `distributed`, each data-parallel rank has the moments and the copies of some of the
parameters, updates these, and sends them to the others (ZeRO-1, arXiv 1910.02054 §5.1, by whole
tensors):

    parameter        embedding   layer 0   layer 1   norm
    its owner        rank 0      rank 1    rank 1    rank 1       2 data-parallel ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quadriga.config.schema import OptimConfig
from quadriga.engines.megatron.ranks import Ranks
from quadriga.engines.megatron.weights import OwnTensor, RankWeights
from quadriga.engines.optimizers.rules import MOMENTS, AdamW, UpdateRule
from quadriga.engines.optimizers.sharded import ShardedOptimizer
from quadriga.parallel.balancing import owners_of


class MegatronOptimizer:
    """AdamW over the parameters of a stage.

    Args:
        parameters: of the stage, by name. Megatron-core's data parallelism adds up their gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weights: RankWeights,
        ranks: Ranks,
        config: OptimConfig,
        total_steps: int | None,
        *,
        device: torch.device,
        distributed: bool,
    ) -> None:
        self._parameters, self._weights = parameters, weights
        self._ranks, self._device = ranks, device
        self._tensors = {own.name: own for own in weights.tensors}
        self._owners = self._choose_owners(distributed)
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype.itemsize < 4 else p
            for name, p in parameters.items()
            if self.owns(self._tensors[name])
        }
        named = list(self.masters.items())
        rules: list[UpdateRule] = [AdamW(named, config)] if named else []
        self.inner = ShardedOptimizer(
            rules, config, total_steps, shard_group=None, device=device, norm=self._global_norm
        )

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
        return self._ranks.expert_replicas if tensor.of_expert else self._ranks.replica_group

    def step(self) -> tuple[float, float]:
        """Clip the gradients and update. Returns (gradient norm, learning rate).

        Waits for: all ranks. Raises `NonFiniteError` as `ShardedOptimizer.step`.
        """
        for name, master in self.masters.items():
            master.grad = self._gradient(name)
        made = self.inner.step_count - self.inner.skipped
        norm, rate = self.inner.step()
        if self.inner.step_count - self.inner.skipped > made:
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
        yield from self.inner.existing_moments()
        yield from (m for name, m in self.masters.items() if m is not self._parameters[name])

    # Checkpoints

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return moment -> parameter -> tensor, of what this rank has; zeros before a step."""
        found: dict[str, dict[str, Tensor]] = {moment: {} for moment in MOMENTS}
        for key, tensor in self.inner.tensors().items():
            moment, name = key.split(".", 1)
            found[moment][name] = tensor
        return found

    def writes(self, tensor: OwnTensor) -> bool:
        """Whether this rank writes the state of a tensor into a checkpoint."""
        if self._owners[tensor.name] is None:
            return self._weights.first_copy(tensor)
        return tensor.counted and self.owns(tensor)
