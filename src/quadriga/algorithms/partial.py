"""Metrics that can be merged over micro-batches and ranks.

A mean of means is wrong if the parts differ in size. A total with its weight can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "max", "min"]


# Mean of a metric over two micro-batches, the first with three tokens, the second with one:
#
#     values       Partial.mean
#     1  2  3      total  6, weight 3
#     10           total 10, weight 1
#     merged       16 / 4 = 4           the mean of the means would be (2 + 10) / 2 = 6
@dataclass(frozen=True)
class Partial:
    """A metric over some rows of a batch. Both tensors are 0-d and detached.

    The tensors stay on their device until `as_numbers` is called, so that a micro-batch does not
    wait for it.

    Attributes:
        total: the sum of the values (mean, sum), or their extreme (max, min).
        weight: the number of values (mean), or 1 if there was any value, else 0.
        reduction: how partials of the metric are merged.
    """

    total: Tensor
    weight: Tensor
    reduction: Reduction

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the mean of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.sum(), "mean")

    @classmethod
    def sum(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the sum of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.any().long(), "sum")

    @classmethod
    def max(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the maximum of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, -torch.inf)
        total = kept.max() if kept.numel() else kept.new_tensor(-torch.inf)
        return cls(total, mask.any().long(), "max")

    @classmethod
    def min(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the minimum of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, torch.inf)
        total = kept.min() if kept.numel() else kept.new_tensor(torch.inf)
        return cls(total, mask.any().long(), "min")

    def as_numbers(self) -> tuple[float, float, Reduction]:
        """Return (total, weight, reduction) as Python values; waits for the device."""
        return float(self.total), float(self.weight), self.reduction


def merge_partials(parts: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """Merge the partials of all micro-batches and ranks into one float per metric.

    The order of `parts` does not matter. A metric without a single value (weight 0 everywhere) is
    absent from the result.
    """
    gathered: dict[str, list[tuple[float, float, Reduction]]] = {}
    for part in parts:
        for name, partial in part.items():
            gathered.setdefault(name, []).append(partial.as_numbers())
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
