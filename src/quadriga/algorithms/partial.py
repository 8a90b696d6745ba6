"""Metrics in parts: each micro-batch and rank gives its share, the sum is the truth.

A mean of means is wrong as soon as parts differ in size; a total with its weight is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Partial:
    """One metric's share of one part of a batch. Both tensors are 0-d and carry no gradient.

    Attributes:
        total: Σ of the values (mean, sum), or their extreme.
        weight: how many values (mean only; otherwise 1 if there was any value, else 0).
    """

    total: Tensor
    weight: Tensor
    reduction: Reduction

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor) -> Partial:
        """The mean of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.sum(), "mean")

    @classmethod
    def sum(cls, values: Tensor, mask: Tensor) -> Partial:
        """The sum of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.any().long(), "sum")

    @classmethod
    def max(cls, values: Tensor, mask: Tensor) -> Partial:
        """The largest of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, -torch.inf)
        total = kept.max() if kept.numel() else kept.new_tensor(-torch.inf)
        return cls(total, mask.any().long(), "max")

    @classmethod
    def min(cls, values: Tensor, mask: Tensor) -> Partial:
        """The smallest of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, torch.inf)
        total = kept.min() if kept.numel() else kept.new_tensor(torch.inf)
        return cls(total, mask.any().long(), "min")

    def plain(self) -> tuple[float, float, Reduction]:
        """(total, weight, reduction) as numbers."""
        return float(self.total), float(self.weight), self.reduction


def merge_partials(parts: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """One number a metric from all parts of a batch (micro-batches, ranks), in any order.

    A metric of which no part had a value is left out. A mean over nothing does not exist.
    """
    gathered: dict[str, list[tuple[float, float, Reduction]]] = {}
    for part in parts:
        for name, partial in part.items():
            gathered.setdefault(name, []).append(partial.plain())
    merged: dict[str, float] = {}
    for name, shares in gathered.items():
        present = [share for share in shares if share[1] > 0]
        if not present:
            continue
        totals = [share[0] for share in present]
        reduction = present[0][2]
        match reduction:
            case "mean":
                merged[name] = sum(totals) / sum(share[1] for share in present)
            case "sum":
                merged[name] = sum(totals)
            case "max":
                merged[name] = max(totals)
            case "min":
                merged[name] = min(totals)
    return merged
