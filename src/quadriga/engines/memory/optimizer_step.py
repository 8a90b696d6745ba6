"""The optimizer's state on one rank, and what its step allocates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quadriga.config.schema import OptimizerName
from quadriga.engines.optimizers.choice import state_bytes
from quadriga.engines.optimizers.muon import newton_schulz
from quadriga.models.simulated.allocations import AllocationCounter

EIGHT_BIT_STEP_BYTES = 53
"""For each element of a parameter shard, what a step of torchao's AdamW allocates where it is not
compiled (on a CPU): decoded moments in float32 and codes in int64. Measured."""


@dataclass(frozen=True)
class Updated:
    """A trained parameter: its whole shape, and the rule that updates it."""

    shape: tuple[int, ...]
    rule: OptimizerName

    def rows(self, shards: int) -> int:
        """Return the rows of the largest shard."""
        return math.ceil(self.shape[0] / shards) if self.shape else 1

    def shard_elements(self, shards: int) -> int:
        """Return the elements of the largest shard."""
        return self.rows(shards) * math.prod(self.shape[1:])


def optimizer_bytes(parameters: Sequence[Updated], dtype: torch.dtype, shards: int) -> int:
    """Return the bytes of the state of the rank with the largest shards."""
    return sum(state_bytes(p.rule, p.shape, p.rows(shards), dtype) for p in parameters)


def step_bytes(
    parameters: Sequence[Updated], dtype: torch.dtype, shards: int, *, on_cpu: bool
) -> int:
    """Return what a step allocates on the device, beside the gradients.

    Args:
        dtype: of the parameters.
        on_cpu: whether the device is a CPU.
    """
    # AdamW is fused: it allocates nothing.
    muon = [p for p in parameters if p.rule == "muon"]
    direction = dtype if on_cpu else torch.bfloat16
    experts = [p for p in muon if len(p.shape) == 3]
    matrices = sorted((p for p in muon if len(p.shape) == 2), key=lambda p: -math.prod(p.shape))
    found = [0, _round_bytes(matrices[:shards], direction, shards)]
    for p in experts:
        shape = (p.rows(shards), *p.shape[1:])
        found.append(math.prod(shape) * direction.itemsize + _newton_schulz_bytes(shape, direction))
    if on_cpu:
        found += [
            p.shard_elements(shards) * EIGHT_BIT_STEP_BYTES
            for p in parameters
            if p.rule == "adamw_8bit"
        ]
    return max(found)


def _round_bytes(matrices: Sequence[Updated], dtype: torch.dtype, shards: int) -> int:
    """Return the bytes of the largest round of Muon: one matrix for each rank.

    `whole_matrices` has an example of a round.
    """
    if not matrices:
        return 0
    own = sum(matrix.shard_elements(shards) for matrix in matrices) * dtype.itemsize
    whole = math.prod(matrices[0].shape) * dtype.itemsize
    # The shards to be sent are joined, and a whole matrix is received.
    exchange = own + whole if shards > 1 else 0
    return own + exchange + _newton_schulz_bytes(matrices[0].shape, dtype)


def _newton_schulz_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return what the iteration allocates, counted on the meta device."""
    matrix = torch.empty(*shape, dtype=dtype, device="meta")
    counter = AllocationCounter()
    with counter:
        newton_schulz(matrix)
    return counter.peak
