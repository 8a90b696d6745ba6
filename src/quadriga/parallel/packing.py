"""From padded rows to the rows that models compute: packed, or with their padding at the end.

Shapes: B rows, S = P + R columns (prompt, response), N packed tokens, L tokens of the longest row,
K targets: the response tokens whose outputs a caller needs.

A packed micro-batch is one row of N tokens without padding. A prompt that several rows share is in
it once. Only attention needs rows: `PackedRows` says which tokens make up each row, and each kernel
reads them in an arrangement of its own.

Models that cannot compute packed rows get aligned rows, whose padding comes last. A token of a
causal model does not depend on the tokens after it, so an aligned row needs no attention mask and
no position ids: the model computes each of its tokens exactly as if the row were alone. This holds
for every causal architecture, also for those with recurrent layers, for which padding at the start
would enter the state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quadriga.errors import ProtocolError
from quadriga.parallel.attention_blocks import PackedRows
from quadriga.parallel.device import on_device


@dataclass(frozen=True)
class Targets:
    """The K entries of a response mask that are 1, in row-major order.

    Attributes:
        row: [K] int64, the row of the batch.
        position: [K] int64, the number of tokens of the row that come before the target.
        labels: [K] int64, the token ids.
        index: [K] int64, b * R + t for the target at [b, t] of the response mask.
        shape: (B, R).
    """

    row: Tensor
    position: Tensor
    labels: Tensor
    index: Tensor
    shape: tuple[int, int]

    def unpack(self, values_K: Tensor) -> Tensor:
        """Scatter [K] values to [B, R], with 0 where there is no target. Differentiable."""
        rows, columns = self.shape
        flat = values_K.new_zeros(rows * columns)
        return flat.index_put((self.index,), values_K).view(rows, columns)


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


# Example: two samples of the prompt (11 12) and one of (13 14 15). "·" is padding, P = R = 3.
#
#            input_ids               attention_mask     response_mask
#   row 0     ·  11  12 | 21  22   ·     0 1 1 | 1 1 0           1 1 0
#   row 1     ·  11  12 | 31   ·   ·     0 1 1 | 1 0 0           1 0 0
#   row 2    13  14  15 | 41  42  43     1 1 1 | 1 1 1           1 0 1     42: an observation
#
# Packed, with the prompt of rows 0 and 1 once: N = 11 tokens instead of 18 columns.
#
#   packed index     0   1   2   3   4   5   6   7   8   9  10
#   input_ids       11  12  21  22  31  13  14  15  41  42  43
#   position_ids     0   1   2   3   2   0   1   2   3   4   5    restart at 0 in every row
#
# The output at one token predicts the next token of its row. The K = 5 targets:
#
#   label           21  22  31  41  43
#   predictor        1   2   1   7   9    token 12 (index 1) predicts 21 in row 0 and 31 in row 1
#   index            0   1   3   6   8    b · R + t, the position of the target in [B, R]


@dataclass(frozen=True)
class PackedBatch:
    """One packed micro-batch.

    Attributes:
        input_ids, position_ids: [1, N] int64.
        rows: which tokens make up each row. Always on the CPU.
        predictors: [K] int64, the packed index of the token whose output predicts target k.
        targets: of all rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: PackedRows
    predictors: Tensor
    targets: Targets

    def to(self, device: torch.device) -> PackedBatch:
        """Return the same batch with every tensor on `device`, except in `rows`."""
        return replace(on_device(self, device), targets=on_device(self.targets, device))


def in_equal_slices(packed: PackedBatch, count: int) -> PackedBatch:
    """Return the batch with padding tokens at its end, so that `count` divides the N tokens.

    They are the prompt of one more row, without a target. So they change no other token, and every
    kernel of attention can compute them.
    """
    more = -packed.input_ids.shape[1] % count
    if not more:
        return packed
    pad = torch.nn.functional.pad
    old, index = packed.rows, torch.arange(more)
    row, wider = len(old.length), max(more - old.token_index.shape[1], 0)
    token_index = pad(old.token_index, (0, wider, 0, 1))
    token_index[row, :more] = packed.input_ids.shape[1] + index
    rows = PackedRows(
        token_index=token_index,
        prompt_length=pad(old.prompt_length, (0, 1), value=more),
        length=pad(old.length, (0, 1), value=more),
        prompt_owner=pad(old.prompt_owner, (0, 1), value=row),
        row=pad(old.row, (0, more), value=row),
        column=torch.cat([old.column, index]),
    )
    positions = torch.cat([packed.position_ids, index[None]], 1)
    ids = pad(packed.input_ids, (0, more))
    return replace(packed, input_ids=ids, position_ids=positions, rows=rows)


def first_row_with_same_prompt(prompts: Tensor, mask: Tensor) -> Tensor:
    """Return, for each row, the index [B] of the first row with the same prompt.

    Two prompts are the same if ids and mask (both [B, P]) agree.
    """
    rows = torch.arange(len(prompts))
    if len(prompts) < 2:
        return rows
    # Masked columns become −1, so that equal ids under different masks stay different prompts.
    visible = torch.where(mask, prompts, -1)
    _, prompt_group = torch.unique(visible, dim=0, return_inverse=True)
    # Rows 0 1 2 with prompts A A B: prompt_group = 0 0 1, first = 0 2, so the result is 0 0 2.
    first = torch.full((len(prompts),), len(prompts))
    first = first.scatter_reduce(0, prompt_group, rows, "amin")
    return first[prompt_group]


def pack_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    *,
    share_prompts: bool = True,
) -> PackedBatch:
    """Pack [B, P + R] rows (left-padded prompts, then responses).

    Args:
        input_ids, attention_mask: [B, P + R].
        response_mask: [B, R], 1 at the targets: the response tokens whose outputs are needed.
        share_prompts: pack a prompt that several rows have in common once. The result is the same
            function of the weights, because a prompt's hidden states do not depend on what follows.

    Raises:
        ProtocolError: a target has no token before it, or `attention_mask` is 0 at a target.
    """
    prompt_width = input_ids.shape[1] - response_mask.shape[1]
    valid = attention_mask.bool()
    position_BS = valid.long().cumsum(1) - 1
    owner = torch.arange(len(input_ids))
    if share_prompts:
        owner = first_row_with_same_prompt(input_ids[:, :prompt_width], valid[:, :prompt_width])
    rows, kept = _packed_rows(position_BS, valid, owner, prompt_width)

    targets = find_targets(input_ids, valid, position_BS, response_mask)
    return PackedBatch(
        input_ids=input_ids[kept][None],
        position_ids=rows.column[None],
        rows=rows,
        predictors=rows.token_index[targets.row, targets.position - 1],
        targets=targets,
    )


def _packed_rows(
    position_BS: Tensor, valid: Tensor, owner: Tensor, prompt_width: int
) -> tuple[PackedRows, Tensor]:
    """Number the tokens to pack. Return the index tables and the mask [B, S] of those tokens."""
    kept = valid.clone()
    kept[owner != torch.arange(len(owner)), :prompt_width] = False
    # The packed index of a kept token is the number of kept tokens before it. In the example above
    # (k: kept; the other entries repeat an index and are not used):
    #
    #             kept           index_BS              after the owner's prompt is copied
    #   row 0   · k k | k k ·   -1  0  1 |  2  3  3    -1  0  1 |  2  3  3
    #   row 1   · · · | k · ·    3  3  3 |  4  4  4    -1  0  1 |  4  4  4
    #   row 2   k k k | k k k    5  6  7 |  8  9 10     5  6  7 |  8  9 10
    index_BS = kept.flatten().long().cumsum(0).view_as(kept) - 1
    index_BS[:, :prompt_width] = index_BS[owner, :prompt_width]
    length = valid.sum(1)
    longest = max(int(length.max()), 1) if len(length) else 1
    row, column = valid.nonzero(as_tuple=True)
    # Move every token from its padded column to its position, so that padding comes last.
    token_index = torch.zeros(len(valid), longest, dtype=torch.int64)
    token_index[row, position_BS[row, column]] = index_BS[row, column]
    kept_row, kept_column = kept.nonzero(as_tuple=True)
    rows = PackedRows(
        token_index=token_index,
        prompt_length=valid[:, :prompt_width].sum(1),
        length=length,
        prompt_owner=owner,
        row=kept_row,
        column=position_BS[kept_row, kept_column],
    )
    return rows, kept


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
#   index              0   1   3   6   8    b · R + t, the position of the target in [B, R]


def left_align(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor
) -> tuple[Tensor, Targets]:
    """Move the tokens of [B, P + R] rows (left-padded prompts, then responses) to column 0.

    Returns the token ids [B, L], 0 at padding, and the targets. The token that predicts a target is
    in the column before its position.

    Raises:
        ProtocolError: a target has no token before it, or `attention_mask` is 0 at a target.
    """
    valid = attention_mask.bool()
    position_BS = valid.long().cumsum(1) - 1
    longest = max(int(valid.sum(1).max()), 1) if len(valid) else 1
    row, column = valid.nonzero(as_tuple=True)
    aligned = input_ids.new_zeros(len(valid), longest)
    aligned[row, position_BS[row, column]] = input_ids[row, column]

    return aligned, find_targets(input_ids, valid, position_BS, response_mask)
