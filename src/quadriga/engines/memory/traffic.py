"""Bytes that one rank sends for its parameters: gathers of FSDP, and reductions of gradients.

s ranks share one copy of the parameters of a unit, and there are r copies. Shards are padded to
equal numbers of rows. A rank sends its shard to s − 1 ranks, and a part of its gradients to each:

    gather       (s − 1) · shard                     numbers of the compute dtype
    reduction    (s − 1) · shard of what is trained  numbers of the dtype of the reduction
                 + 2 · (r − 1) / r · the same shard  of the copies (ring all-reduce)
    sum          2 · (t − 1) / t · what is trained  on each of t ranks of tensor parallelism, as
                                                    norms (ring all-reduce before the reduction)

A forward pass gathers each unit. With `reshard_after_forward` the backward pass gathers layers
again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True)
class Unit:
    """One FSDP unit of a rank.

    Attributes:
        shard, trained: elements of its shard, with padding, and those of them that are trained.
        ranks: that share one copy.
        copies: of the parameters.
    """

    shard: int
    trained: int
    ranks: int
    copies: int

    @staticmethod
    def of(
        parameters: Sequence[nn.Parameter], trained: Collection[int], *, ranks: int, copies: int
    ) -> Unit:
        """Return the unit of some parameters. `trained`: the `id` of each that is trained."""
        learning = [p for p in parameters if id(p) in trained]
        shard, own = (
            sum(shard_elements(p, ranks) for p in some) for some in (parameters, learning)
        )
        return Unit(shard, own, ranks, copies)

    @property
    def reduced(self) -> int:
        """Return the elements that a reduction sends."""
        return (self.ranks - 1) * self.trained + 2 * (self.copies - 1) * self.trained // self.copies


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends.

    Attributes:
        gathers: of the parameters, in one micro-batch.
        reduction: of all gradients: once in an optimizer step, or in each micro-batch with
            `reduce_each_micro_batch`.
    """

    gathers: int = 0
    reduction: int = 0

    @staticmethod
    def of(
        root: Unit,
        layers: Sequence[Unit],
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        *,
        again: bool,
    ) -> Traffic:
        """Return the traffic of a model. `again`: the backward pass gathers layers again."""
        times = [(root, 1), *((layer, 1 + again) for layer in layers)]
        return Traffic(
            gathers=dtype.itemsize * sum(n * (unit.ranks - 1) * unit.shard for unit, n in times),
            reduction=reduce_dtype.itemsize * sum(unit.reduced for unit, _ in times),
        )

    def with_sums(self, size: int, ranks: int) -> Traffic:
        """Return this traffic with sums of gradients of `size` bytes over ranks (all-reduce)."""
        return replace(self, reduction=self.reduction + 2 * (ranks - 1) * size // ranks)


NO_TRAFFIC = Traffic()


def elements(parameters: Iterable[nn.Parameter]) -> int:
    """Return the elements of parameters."""
    return sum(parameter.numel() for parameter in parameters)


def shard_elements(parameter: nn.Parameter, shards: int) -> int:
    """Return the elements on the rank with most of them: rows are divided and rounded up."""
    # 5 rows of 3 elements on 2 ranks: 3 and 2 rows; the first rank holds 3 · 3 elements.
    rows = len(parameter) if parameter.dim() else 1
    return math.ceil(rows / shards) * (parameter.numel() // rows)
