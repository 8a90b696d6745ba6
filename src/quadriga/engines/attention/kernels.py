"""The kernels of attention that need no compilation, and the arrangement of rows that each reads.

Read packed tokens by index.

Shapes: N packed tokens, M slots, H heads, D head size.

Attention by PyTorch's `scaled_dot_product_attention` over blocks of padded rows.

Right on every device, in every dtype and for every mask. Queries, keys and values are gathered into
`AttentionBlocks` (the keys of a shared prompt into each of its rows), and each token's output is
read back. A dense [N, N] mask, most of which would be 0, is never made.

Shapes: N packed tokens, H heads, D head size. In a block: b rows, Lq query and Lk key slots.

Attention by the flash kernel for rows of different lengths (CUDA, 16 bits), in one launch.

The kernel takes any number of queries and keys for each row and aligns their *ends*: with 3 queries
and 5 keys, the first query attends to keys 0 1 2, the last one to all five. So a row whose prompt
was packed with an earlier row has the tokens of its response as queries and those of the whole row
as keys, and neither a mask nor padding is needed.

Shapes: N packed tokens, M keys of all rows, b rows with queries, H heads, Hk key heads, D head
size, Dv size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from quadriga.engines.attention.masks import Scoring
from quadriga.models.log_probs import SavedContext
from quadriga.parallel.attention_blocks import AttentionBlocks, PackedRows, QueryColumns


def gather_tokens(tokens: Tensor, slots: Tensor) -> Tensor:
    """Return `tokens` [N, H, D] at the indices `slots` [M]: [M, H, D].

    The keys of a shared prompt are read by each of its rows, and their gradients are added. In 16
    bits each addition would round (64 rows: 64 roundings of 0.4 % in bfloat16), so they are added
    in float32.
    """
    if tokens.dtype.itemsize >= 4:
        return tokens.index_select(0, slots)
    gathered: Tensor = _Gather.apply(tokens, slots)  # type: ignore[no-untyped-call]  # of torch
    return gathered


class _Gather(torch.autograd.Function):
    """`index_select` whose backward pass adds in float32."""

    @staticmethod
    def forward(ctx: SavedContext, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(tokens)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: SavedContext, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        sums = grad.new_zeros((ctx.size, *grad.shape[1:]), dtype=torch.float32)
        return sums.index_add_(0, slots, grad.float()).to(grad.dtype), None


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: AttentionBlocks, scoring: Scoring
) -> Tensor:
    """Attend within rows: [N, H, D] three times -> [N, H, D]."""
    # Rows 0 and 1 share the prompt tokens 0 1 (`parallel/attention_blocks.py` has the index tables
    # of this example). N = 11 tokens are gathered into 12 + 4 query slots:
    #
    #   q of 11 tokens -> block 0   5 6 7 8 9 10  -> outputs of slots  0 …  5
    #                               0 1 *  * · ·                       6 … 11
    #                     block 1   2 3                               12   13
    #                               4 ·                               14   15
    #
    #   slot_of_token   6 7 12 13 14 0 1 2 3 4 5  reads the outputs of the 11 tokens back
    outputs = []
    for block in rows.blocks:
        slots = (
            _gather_slots(q, block.queries),
            _gather_slots(k, block.keys),
            _gather_slots(v, block.keys),
        )
        seen = block.mask if scoring.mask is None else scoring.mask.of_block(block)
        if scoring.softcap is None and scoring.sinks is None:
            out = scaled_dot_product_attention(
                *slots,
                attn_mask=seen,
                is_causal=seen is None,
                scale=scoring.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            out = _attend_to_scores(*slots, seen, scoring)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, rows.slot_of_token)


def _attend_to_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend with capped scores or sinks, which the fused kernel cannot compute: [b, H, Lq, D].

    The scores [b, H, Lq, Lk] exist as a whole.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scoring.scaling or q.shape[-1] ** -0.5)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _gather_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens [N, H, D] into slots [b, L]: [b, H, L, D]."""
    rows = gather_tokens(tokens, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


SIZE_UNIT = 8
"""The kernel computes head sizes that are a multiple of this."""

# The example of `parallel/packing.py`: row 1 uses the prompt of row 0.
#
#            queries          keys                  query_ends   key_ends
#   row 0    0 1 2 3          0 1 2 3                    4           4
#   row 1    4                0 1 4                      5           7
#   row 2    5 6 7 8 9 10     5 6 7 8 9 10              11          13
#
# The queries are the packed tokens in their order. `keys` = 0 1 2 3 0 1 4 5 6 7 8 9 10.


@dataclass(frozen=True)
class RowLengths:
    """The queries and the keys of each row.

    Attributes:
        query_ends: [b + 1] int32, the packed index behind the last query of each row, after a 0.
        key_ends: [b + 1] int32, the same for the keys.
        most_queries, most_keys: at least as many as any row has.
        keys: [M] int64, the packed index of each key. None: the keys are the queries.
    """

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    keys: Tensor | None

    @staticmethod
    def of(rows: PackedRows, device: torch.device, queries_of: range | None = None) -> RowLengths:
        """Return the lengths of `rows`, with tensors on `device`.

        `queries_of`: the packed tokens that are queries; None: all.
        """
        columns = QueryColumns.of(rows, queries_of or range(len(rows.row)))
        queries, length = columns.end - columns.first, columns.end
        tokens = rows.token_index[columns.rows]
        keys = None
        # Each row has as many keys as queries or more. If the sums are equal, all are equal.
        if int(length.sum()) > len(rows.row) or queries_of is not None:
            keys = tokens[torch.arange(tokens.shape[1]) < length[:, None]].to(device)
        return RowLengths(
            query_ends=_ends(queries).to(device),
            key_ends=_ends(length).to(device),
            # With at most one query in each row, kernels for generation would be chosen.
            most_queries=max(int(queries.max()), 2),
            most_keys=max(int(length.max()), 2),
            keys=keys,
        )


def attend_lengths(q: Tensor, k: Tensor, v: Tensor, rows: RowLengths, scoring: Scoring) -> Tensor:
    """Attend within rows: [N, H, D], [N, Hk, D], [N, Hk, Dv] -> [N, H, Dv]."""
    window = None if scoring.mask is None else scoring.mask.size
    if rows.keys is not None:
        k, v = gather_tokens(k, rows.keys), gather_tokens(v, rows.keys)
    size, value_size = q.shape[-1], v.shape[-1]
    width = -(-max(size, value_size) // SIZE_UNIT) * SIZE_UNIT
    # Elements that are 0 in queries and keys add 0 to a score, and those of values are cut off.
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    before = -1 if window is None or window >= rows.most_keys else window - 1
    out = varlen_attn(
        q, k, v, rows.query_ends, rows.key_ends, rows.most_queries, rows.most_keys,
        scale=scoring.scaling or size**-0.5,
        window_size=(before, 0),  # keys before the query's own, and after it; −1: any number
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a pair if auxiliary outputs are requested
    return out[..., :value_size]


def _ends(lengths: Tensor) -> Tensor:
    """Return the cumulative sums [b + 1] int32 of `lengths` [b], from 0."""
    return pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
