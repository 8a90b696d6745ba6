"""Rows with their padding at the end, for models that cannot compute packed rows.

Shapes: B rows, S = P + R columns (prompt, response), L tokens of the longest row, K targets.

A token of a causal model does not depend on the tokens after it. A row whose padding comes last
therefore needs no attention mask and no position ids: the model computes each of its tokens exactly
as if the row were alone. This holds for every causal architecture, also for those with recurrent
layers, for which padding at the start would enter the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.parallel.targets import find_targets, scatter_targets

# The example of `packing.py`. "·" is padding, P = R = 3, L = 6:
#
#            input_ids               response_mask     aligned input_ids     position of a token
#   row 0     ·  11  12 | 21  22   ·     1 1 0         11 12 21 22  ·  ·     -1  0  1 | 2 3 3
#   row 1     ·  11  12 | 31   ·   ·     1 0 0         11 12 31  ·  ·  ·     -1  0  1 | 2 2 2
#   row 2    13  14  15 | 41  42  43     1 0 1         13 14 15 41 42 43      0  1  2 | 3 4 5
#
# The output at one token predicts the next token of its row. The K = 5 targets:
#
#   label             21  22  31  41  43
#   row                0   0   1   2   2
#   predictor column   1   2   1   2   4    position of the label minus 1
#   target_index       0   1   3   6   8    b · R + t, the position of the target in [B, R]


@dataclass(frozen=True)
class AlignedBatch:
    """Rows that start at column 0.

    Attributes:
        input_ids: [B, L] int64, 0 at padding.
        predictors: (row, column) of the token that predicts each target, both [K] int64.
        labels: [K] int64, the token ids of the targets.
        target_index: [K] int64, the flat index b * R + t of target k.
        shape: (B, R).
    """

    input_ids: Tensor
    predictors: tuple[Tensor, Tensor]
    labels: Tensor
    target_index: Tensor
    shape: tuple[int, int]

    def unpack(self, values_K: Tensor) -> Tensor:
        """Scatter [K] values to [B, R], with 0 where there is no target. Differentiable."""
        return scatter_targets(values_K, self.target_index, self.shape)

    def to(self, device: torch.device) -> AlignedBatch:
        """Return the same batch with every tensor on `device`."""
        row, column = self.predictors
        return AlignedBatch(
            self.input_ids.to(device, non_blocking=True),
            (row.to(device, non_blocking=True), column.to(device, non_blocking=True)),
            self.labels.to(device, non_blocking=True),
            self.target_index.to(device, non_blocking=True),
            self.shape,
        )


def left_align(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> AlignedBatch:
    """Move the tokens of [B, P + R] rows (left-padded prompts, then responses) to column 0.

    Raises:
        ProtocolError: a target has no token before it, or `attention_mask` is 0 at a target.
    """
    valid = attention_mask.bool()
    position_BS = valid.long().cumsum(1) - 1
    longest = max(int(valid.sum(1).max()), 1) if len(valid) else 1
    row, column = valid.nonzero(as_tuple=True)
    aligned = input_ids.new_zeros(len(valid), longest)
    aligned[row, position_BS[row, column]] = input_ids[row, column]

    targets = find_targets(input_ids, valid, position_BS, response_mask)
    return AlignedBatch(
        input_ids=aligned,
        predictors=(targets.row, targets.position - 1),
        labels=targets.labels,
        target_index=targets.flat_index,
        shape=targets.shape,
    )
