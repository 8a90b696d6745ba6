"""Attention by PyTorch's `scaled_dot_product_attention` over blocks of padded rows.

Right on every device, in every dtype and for every mask. Queries, keys and values are gathered into
`AttentionBlocks` (the keys of a shared prompt into each of its rows), and each token's output is
read back. A dense [N, N] mask, most of which would be 0, is never made.

Shapes: N packed tokens, H heads, D head size. In a block: b rows, Lq query and Lk key slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quadriga.engines.attention.gather import gather_tokens
from quadriga.engines.attention.masks import LocalMask
from quadriga.parallel.attention_blocks import AttentionBlocks


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: AttentionBlocks,
    *,
    mask: LocalMask | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend within rows: [N, H, D] three times -> [N, H, D].

    Args:
        mask: None: each token attends to all tokens of its row up to itself.
        softcap, sinks: see `packed_attention`.
    """
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
        seen = block.mask if mask is None else mask.of_block(block)
        if softcap is None and sinks is None:
            out = scaled_dot_product_attention(
                *slots,
                attn_mask=seen,
                is_causal=seen is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            out = _attend_to_scores(*slots, seen, scaling, softcap, sinks)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, rows.slot_of_token)


def _attend_to_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with capped scores or sinks, which the fused kernel cannot compute: [b, H, Lq, D].

    The scores [b, H, Lq, Lk] exist as a whole.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _gather_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens [N, H, D] into slots [b, L]: [b, H, L, D]."""
    rows = gather_tokens(tokens, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)
