"""Parameters that are made of several tensors of a folder.

In most mixtures of experts, a parameter holds all experts of a layer, and the folder has tensors
for each of them. Two experts with gates and ups of 3 rows:

    gate_up_proj [2, 6, D]    expert 0: 3 rows │ 3 rows       expert 1: 3 rows │ 3 rows
    tensors of the folder     0.gate_proj      │ 0.up_proj    1.gate_proj      │ 1.up_proj

So the elements of the parameter are those of the tensors, one tensor after another.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from quadriga.models.weight_files import StoredTensor


@dataclass(frozen=True)
class JoinedTensor:
    """Tensors of a folder whose elements, one tensor after another, are those of a parameter.

    Attributes:
        shape: of the parameter, in row-major order.
        parts: the tensors. All have the same dtype.
    """

    shape: tuple[int, ...]
    parts: tuple[StoredTensor, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the tensors, as safetensors names it."""
        return self.parts[0].dtype

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first element of each part, and of the one behind the last part."""
        return [0, *accumulate(math.prod(part.shape) for part in self.parts)]

    def ranges(self, first: int, count: int) -> Iterator[tuple[StoredTensor, int, int]]:
        """Yield which elements of which parts are the elements from `first` on.

        Yields:
            (part, index of its first element, number of elements).
        """
        # Parts of 6 elements each, first = 4 and 5 elements: 4 and 5 of part 0, 0 to 2 of part 1.
        number = bisect_right(self._starts, first) - 1
        while count > 0:
            start, stop = self._starts[number : number + 2]
            size = min(stop - first, count)
            yield self.parts[number], first - start, size
            first, count, number = first + size, count - size, number + 1


Source = StoredTensor | JoinedTensor
"""Where the elements of a parameter are in a folder."""


def joins_experts(rule: WeightConverter) -> bool:
    """Return whether a rule of transformers stacks the tensors of experts, and does nothing else.

    It stacks a tensor of each expert in dimension 0; or several, one after another in dimension 1.
    """
    operations = list(rule.operations)
    kinds = [type(operation) for operation in operations]
    if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return False
    dims = [getattr(operation, "dim", None) for operation in operations]
    return dims == [0, 1][: len(dims)] and len(rule.target_patterns) == 1


def joined_tensor(
    rule: WeightConverter, found: Mapping[str, Sequence[StoredTensor]], shape: tuple[int, ...]
) -> JoinedTensor | None:
    """Return the tensors of a parameter in their order; None if they are not all its elements.

    Args:
        rule: for which `joins_experts` is true.
        found: source pattern of the rule -> its tensors, in the order of the experts.
        shape: of the parameter, [experts, rows, ...].
    """
    kinds = [found.get(pattern, ()) for pattern in rule.source_patterns]
    if any(len(tensors) != shape[0] for tensors in kinds):
        return None
    parts = tuple(tensor for of_expert in zip(*kinds, strict=True) for tensor in of_expert)
    if len({tensor.dtype for tensor in parts}) != 1:
        return None
    if len(kinds) == 1:
        fits = all(tensor.shape == shape[1:] for tensor in parts)
    else:
        rows = [[tensor.shape[0] for tensor in tensors] for tensors in kinds]
        fits = all(tensor.shape[1:] == shape[2:] for tensor in parts)
        fits = fits and all(sum(of_expert) == shape[1] for of_expert in zip(*rows, strict=True))
    return JoinedTensor(shape, parts) if fits else None
