"""Muon.

Muon: the update of a hidden matrix is its momentum with all singular values near 1.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale
of J. Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982, section 2.2):

    m ← μ m + (1 − μ) g
    u = (1 − μ) g + μ m                                   Nesterov
    w ← w − η λ w − η · 0.2 √max(A, B) · NewtonSchulz(u)  for w of shape [A, B]

An orthogonal matrix has the root mean square 1 / √max(A, B), so the update has 0.2, which is about
that of AdamW. Learning rate and weight decay of AdamW therefore hold for Muon too.

Orthogonalisation of matrices by Newton-Schulz iteration, as Muon uses it.

Shapes: A rows, B columns.

Apply a function of whole matrices to matrices whose rows are on several ranks.

Each rank computes some of the matrices. Every row is sent to the rank that computes its matrix, and
sent back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers.rules import Named, local_shard, sharded_like

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
        return apply_to_whole_matrices(newton_schulz, directions, totals, self._group)

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


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial in K. Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024). Its slope at 0 is as large as possible, so small singular values grow fast."""
STEPS = 5
EPSILON = 1e-7


def newton_schulz(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """Return each matrix [..., A, B] with its singular values moved to about 1.

    For G = U S Vᵀ the result is U p(p(… p(S / ‖G‖))) Vᵀ with p(s) = a s + b s³ + c s⁵. After five
    steps the singular values are between 0.7 and 1.2, except those that were almost 0. The dtype
    does not change; bfloat16 is precise enough (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    # The products are with the smaller of the two Gram matrices.
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # ‖·‖ is the Frobenius norm: it is at least the largest singular value.
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x.div(norm.clamp(min=EPSILON))
    for _ in range(steps):
        gram = x @ x.mT
        x = x.mul(a) + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


# Two ranks, matrices P (3 rows) and Q (2 rows), the first rank has the larger half of the rows:
#
#              rank 0               rank 1
#   before     P0 P1, Q0            P2, Q1
#   exchange   P0 P1 | P2           Q0 | Q1           rank 0 has the whole P, rank 1 the whole Q
#   compute    f(P)                 f(Q)
#   exchange   f(P)0 f(P)1, f(Q)0   f(P)2, f(Q)1      each rank has its rows of both again


def apply_to_whole_matrices(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[Tensor],
    totals: Sequence[int],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return this rank's rows of `function(matrix)` for each matrix, which has the same shape.

    `shards` are this rank's rows of matrices with `totals` rows. They are divided as FSDP divides
    them: the same number for each rank, rounded up, and fewer or none for the last ranks.

    Rank i computes matrix i, so there are at most as many matrices as ranks. All ranks of `group`
    call it with the same matrices in the same order. None: the shards are the matrices.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [function(rows) for rows in shards]
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    assert len(shards) <= ranks
    sent = [rows.numel() for rows in shards] + [0] * (ranks - len(shards))
    received = [0] * ranks
    if own < len(shards):
        total, columns = totals[own], shards[own].shape[1]
        step = -(-total // ranks)
        received = [max(0, min(step, total - rank * step)) * columns for rank in range(ranks)]
    flat = torch.cat([rows.flatten() for rows in shards])
    whole = flat.new_empty(sum(received))
    dist.all_to_all_single(whole, flat, received, sent, group=group)
    if own < len(shards):
        # The rows of the ranks follow each other, so they are the matrix.
        whole = function(whole.view(totals[own], -1)).contiguous().flatten()
    dist.all_to_all_single(flat, whole, sent, received, group=group)
    parts = torch.split(flat, [rows.numel() for rows in shards])
    return [part.view_as(rows) for part, rows in zip(parts, shards, strict=True)]
