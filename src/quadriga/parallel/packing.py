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

A row of an episode may have several contexts, numbered from 1 in its attention mask: sequences that
do not see each other (`by_context`). Models compute each of them as a row.
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
        row: [K] int64, the row that a model computes; see `by_context`.
        position: [K] int64, the number of tokens of this row that come before the target.
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


@dataclass(frozen=True)
class ContextRows:
    """Rows of one context each, in the form of `pack_rows`.

    Attributes:
        valid: [V, S] bool, where there is a token.
        index: [V, R] int64, b * R + t: the place of each response token in the batch. None: the
            rows are those of the batch.
        shape: (B, R) of the batch.
    """

    input_ids: Tensor
    valid: Tensor
    response_mask: Tensor
    shape: tuple[int, int]
    index: Tensor | None = None


# Example: a row with two contexts, P = 3, R = 8. "·" is padding.
#
#   input_ids         ·  11  12 | 21  22  31  32  41  42   ·   ·
#   attention_mask    0   1   1 |  1   1   2   2   2   2   0   0
#   response_mask                  1   1   0   0   1   1   0   0
#
# As two rows: the prompt of the second context are its tokens before the first target, so that
# contexts that begin with the same tokens share them.
#
#   input_ids        11  12 | 21  22        index    0   1
#                    31  32 | 41  42                 4   5


def by_context(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> ContextRows:
    """Return each context of [B, P + R] rows as a row. The contexts of one row follow each other.

    Raises:
        ProtocolError: `attention_mask` is 0 at a target.
    """
    shape = (len(response_mask), response_mask.shape[1])
    old_width = input_ids.shape[1] - shape[1]
    if not bool(attention_mask[:, old_width:][response_mask.bool()].all()):
        raise ProtocolError(
            "response_mask is 1 where attention_mask is 0; only tokens can be targets",
            field="response_mask",
        )
    if not attention_mask.numel() or int(attention_mask.max()) <= 1:
        return ContextRows(input_ids, attention_mask.bool(), response_mask, shape)
    numbers = torch.arange(1, int(attention_mask.max()) + 1)
    present = (attention_mask[:, None] == numbers[:, None]).any(-1)
    present[:, 0] = True  # a row without tokens stays a row
    row, context = present.nonzero(as_tuple=True)
    own = attention_mask[row] == numbers[context][:, None]
    target = torch.nn.functional.pad(response_mask, (old_width, 0)).bool()[row] & own
    # The column where the prompt of a context ends.
    columns = torch.arange(input_ids.shape[1])
    first = torch.where(target, columns, len(columns)).amin(1)
    ends = torch.where(context == 0, old_width, first)
    in_prompt = own & (columns < ends[:, None])
    prompt, length = in_prompt.sum(1), own.sum(1)
    width, right = int(prompt.max()), int((length - prompt).max())
    of, old = own.nonzero(as_tuple=True)
    new = (own.long().cumsum(1) - 1)[of, old] - prompt[of] + width
    ids = input_ids.new_zeros(len(row), width + right)
    valid, targets = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    index = torch.zeros_like(ids)
    ids[of, new], valid[of, new] = input_ids[row[of], old], True
    targets[of, new] = target[of, old].to(targets.dtype)
    index[of, new] = row[of] * shape[1] + old - old_width
    return ContextRows(ids, valid, targets[:, width:], shape, index[:, width:])


def find_targets(rows: ContextRows, position_VS: Tensor) -> Targets:
    """Return the targets of rows. `position_VS`: [V, S] int64, the number of tokens of the row
    before each token.

    Raises:
        ProtocolError: a target has no token before it.
    """
    width = rows.response_mask.shape[1]
    row, target = rows.response_mask.bool().nonzero(as_tuple=True)
    column = target + rows.input_ids.shape[1] - width
    position = position_VS[row, column]
    if bool((position < 1).any()):
        raise ProtocolError(
            "response_mask is 1 at a token that has no token before it; every response needs a "
            "prompt of at least one token",
            field="response_mask",
        )
    index = row * width + target if rows.index is None else rows.index[row, target]
    return Targets(row, position, rows.input_ids[row, column], index, rows.shape)


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
        routes: [N, layers, K], the experts of each token; None: they are not given.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: PackedRows
    predictors: Tensor
    targets: Targets
    routes: Tensor | None = None

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
    ids, routes = pad(packed.input_ids, (0, more)), packed.routes
    routes = routes if routes is None else pad(routes, (0, 0, 0, 0, 0, more), value=-1)
    return replace(packed, input_ids=ids, position_ids=positions, rows=rows, routes=routes)


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
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, *, share_prompts: bool = True
) -> PackedBatch:
    """Pack [B, P + R] rows (left-padded prompts, then responses).

    Args:
        input_ids, attention_mask: [B, P + R]. The mask has the number of the context at a token,
            which is 1 without several contexts.
        response_mask: [B, R], 1 at the targets: the response tokens whose outputs are needed.
        share_prompts: pack a prompt that several rows have in common once. The result is the same
            function of the weights, because a prompt's hidden states do not depend on what follows.

    Raises:
        ProtocolError: a target has no token before it, or `attention_mask` is 0 at a target.
    """
    own = by_context(input_ids, attention_mask, response_mask)
    ids, valid = own.input_ids, own.valid
    prompt_width = ids.shape[1] - own.response_mask.shape[1]
    position_VS = valid.long().cumsum(1) - 1
    owner = torch.arange(len(ids))
    if share_prompts:
        owner = first_row_with_same_prompt(ids[:, :prompt_width], valid[:, :prompt_width])
    rows, kept = _packed_rows(position_VS, valid, owner, prompt_width)

    targets = find_targets(own, position_VS)
    return PackedBatch(
        input_ids=ids[kept][None], position_ids=rows.column[None], rows=rows,
        predictors=rows.token_index[targets.row, targets.position - 1], targets=targets,
    )  # fmt: skip


def pack_with_routes(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor, *, routes: Tensor
) -> PackedBatch:
    """Pack rows as `pack_rows`, with the experts `routes` [B, P + R, layers, K] of their tokens.

    Prompts are shared that have equal tokens and equal experts, and no contexts of one row.
    """
    # The place b · (P + R) + s of each token is packed in place of its id. Rows 0 and 1 have one
    # prompt, of P = 2 tokens, and R = 1:   0 1 2   0 1 5
    prompt, flat = input_ids.shape[1] - response_mask.shape[1], input_ids.flatten()
    shown = input_ids.masked_fill(attention_mask == 0, -1)[:, :prompt]
    both = torch.cat([shown, routes[:, :prompt].flatten(1)], 1)
    owner = first_row_with_same_prompt(both, torch.ones_like(both, dtype=torch.bool))
    place = torch.arange(len(flat)).view_as(input_ids)
    place[:, :prompt] = place[owner, :prompt]
    packed = pack_rows(place, attention_mask, response_mask)
    return replace(
        packed,
        input_ids=flat[packed.input_ids],
        targets=replace(packed.targets, labels=flat[packed.targets.labels]),
        routes=routes.flatten(0, 1)[packed.input_ids[0]],
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
        token_index=token_index, prompt_length=valid[:, :prompt_width].sum(1), length=length,
        prompt_owner=owner, row=kept_row, column=position_BS[kept_row, kept_column],
    )  # fmt: skip
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

    Returns the token ids [V, L], 0 at padding, of one row for each context, and the targets. The
    token that predicts a target is in the column before its position.

    Raises:
        ProtocolError: a target has no token before it, or `attention_mask` is 0 at a target.
    """
    own = by_context(input_ids, attention_mask, response_mask)
    valid = own.valid
    position_VS = valid.long().cumsum(1) - 1
    longest = max(int(valid.sum(1).max()), 1) if len(valid) else 1
    row, column = valid.nonzero(as_tuple=True)
    aligned = own.input_ids.new_zeros(len(valid), longest)
    aligned[row, position_VS[row, column]] = own.input_ids[row, column]

    return aligned, find_targets(own, position_VS)
