"""Apply a function of whole matrices to matrices whose rows are on several ranks.

Each rank computes some of the matrices. Every row is sent to the rank that computes its matrix, and
sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# Two ranks, matrices P (3 rows) and Q (2 rows), the first rank has the larger half of the rows:
#
#              rank 0               rank 1
#   before     P0 P1, Q0            P2, Q1
#   exchange   P0 P1 | P2           Q0 | Q1           rank 0 has the whole P, rank 1 the whole Q
#   compute    f(P)                 f(Q)
#   exchange   f(P)0 f(P)1, f(Q)0   f(P)2, f(Q)1      each rank has its rows of both again


@dataclass(frozen=True)
class RowShard:
    """This rank's rows of a matrix.

    Attributes:
        rows: [number of own rows, columns].
        total: rows of the whole matrix. They are divided as FSDP divides them: the same number for
            each rank, rounded up, and fewer or none for the last ranks.
    """

    rows: Tensor
    total: int

    def elements_of(self, rank: int, ranks: int) -> int:
        """Return the number of elements that `rank` holds."""
        share = -(-self.total // ranks)
        count = max(0, min(share, self.total - rank * share))
        return count * self.rows.shape[1]


def apply_to_whole_matrices(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[RowShard],
    group: dist.ProcessGroup | None,
) -> list[Tensor]:
    """Return this rank's rows of `function(matrix)` for each matrix, which has the same shape.

    Rank i computes matrix i, so there are at most as many matrices as ranks. All ranks of `group`
    call it with the same matrices in the same order. None: the shards are the matrices.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [function(shard.rows) for shard in shards]
    own, ranks = dist.get_rank(group), dist.get_world_size(group)
    assert len(shards) <= ranks
    sent = [shard.rows.numel() for shard in shards] + [0] * (ranks - len(shards))
    received = [0] * ranks
    if own < len(shards):
        received = [shards[own].elements_of(rank, ranks) for rank in range(ranks)]
    flat = torch.cat([shard.rows.flatten() for shard in shards])
    whole = flat.new_empty(sum(received))
    dist.all_to_all_single(whole, flat, received, sent, group=group)
    if own < len(shards):
        # The rows of the ranks follow each other, so they are the matrix.
        matrix = whole.view(shards[own].total, -1)
        whole = function(matrix).contiguous().flatten()
    dist.all_to_all_single(flat, whole, sent, received, group=group)
    parts = torch.split(flat, [shard.rows.numel() for shard in shards])
    return [part.view_as(shard.rows) for part, shard in zip(parts, shards, strict=True)]
