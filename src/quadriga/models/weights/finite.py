"""Find weights that are NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quadriga.errors import ModelError


@dataclass(frozen=True)
class NotFinite:
    """How many of the `size` elements of a tensor are NaN and infinite."""

    nan: int
    infinite: int
    size: int


def count_not_finite(tensor: Tensor) -> NotFinite:
    """Count the elements of a tensor without gradient that are not finite."""
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return NotFinite(0, 0, tensor.numel())
    # The smallest and the largest value show NaN and infinity without a mask of the same size.
    least, largest = (float(value) for value in torch.aminmax(tensor))
    if math.isfinite(least) and math.isfinite(largest):
        return NotFinite(0, 0, tensor.numel())
    return NotFinite(int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())


def check_all_finite(folder: Path, counts: Mapping[str, NotFinite]) -> None:
    """Check the counts of the parameters of a model.

    Raises:
        ModelError: a weight is not finite.
    """
    wrong = {name: count for name, count in counts.items() if count.nan or count.infinite}
    if wrong:
        name, count = next(iter(wrong.items()))
        raise ModelError(
            f"the weights in {folder} are not finite: {name} has {count.nan} NaN and "
            f"{count.infinite} infinite values of {count.size}"
            + (f", and {len(wrong) - 1} other tensors have some" if len(wrong) > 1 else ""),
            path=str(folder),
        )
