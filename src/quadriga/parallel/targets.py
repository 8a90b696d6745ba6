"""The targets of a micro-batch: the response tokens whose outputs a caller needs.

Shapes: B rows, S = P + R columns (prompt, response), K targets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quadriga.errors import ProtocolError


@dataclass(frozen=True)
class Targets:
    """The K entries of a response mask that are 1, in row-major order.

    Attributes:
        row: [K] int64, the row of the batch.
        position: [K] int64, the number of tokens of the row that come before the target.
        labels: [K] int64, the token ids.
        flat_index: [K] int64, b * R + t for the target at [b, t] of the response mask.
        shape: (B, R).
    """

    row: Tensor
    position: Tensor
    labels: Tensor
    flat_index: Tensor
    shape: tuple[int, int]


def find_targets(
    input_ids: Tensor, valid: Tensor, position_BS: Tensor, response_mask: Tensor
) -> Targets:
    """Return the targets of [B, P + R] rows.

    Args:
        input_ids: [B, S] int64.
        valid: [B, S] bool, where there is a token.
        position_BS: [B, S] int64, the number of tokens of the row before each token.
        response_mask: [B, R], 1 at the targets.

    Raises:
        ProtocolError: a target has no token before it, or `valid` is False at a target.
    """
    width = response_mask.shape[1]
    row, target = response_mask.bool().nonzero(as_tuple=True)
    column = target + input_ids.shape[1] - width
    position = position_BS[row, column]
    if bool((position < 1).any()) or not bool(valid[row, column].all()):
        raise ProtocolError(
            "response_mask is 1 at a token that has no token before it or where attention_mask is "
            "0; every response needs a prompt of at least one token",
            field="response_mask",
        )
    shape = (len(response_mask), width)
    return Targets(row, position, input_ids[row, column], row * width + target, shape)


def scatter_targets(values_K: Tensor, target_index: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scatter [K] values to `shape` [B, R], with 0 where there is no target. Differentiable.

    `target_index` [K] int64 is the flat index b * R + t of each target.
    """
    flat = values_K.new_zeros(shape[0] * shape[1])
    return flat.index_put((target_index,), values_K).view(shape)
