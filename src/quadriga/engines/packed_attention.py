"""Causal attention over packed tokens, for every model that looks up its attention by name.

Every layer but attention works token by token and sees the N packed tokens once. Attention gathers
queries, keys and values into `AttentionBlocks` (the keys of a shared prompt into each of its rows),
runs the fused kernel, and reads each token's output back. A dense [N, N] mask, most of which would
be 0, is never made.

Shapes: N packed tokens, H heads, D head size. In a block: b rows, Lq query and Lk key slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quadriga.errors import ModelError
from quadriga.parallel.attention_blocks import AttentionBlock, AttentionBlocks

ATTENTION_NAME = "quadriga_packed"
"""Name under which transformers finds `packed_attention`."""

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_blocks: AttentionBlocks,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: [1, H, N, D] three times -> ([1, N, H, D], None).

    Transformers passes the arguments of the model's `forward` through, `attention_blocks` among
    them. `attention_mask` is ignored, because the blocks contain no padding that is read.
    """
    # Rows 0 and 1 share the prompt tokens 0 1 (`parallel/attention_blocks.py` has the index tables
    # of this example). N = 11 tokens are gathered into 6 + 9 query slots:
    #
    #   q of 11 tokens -> block 0   0 1 2      -> outputs of slots  0  1  2
    #                               5 6 7                           3  4  5
    #                     block 1   8 9 10                          6  7  8
    #                               2 3 ·                           9 10 11
    #                               4 · ·                          12 13 14
    #
    #   slot_of_token   0 1 9 10 12 3 4 5 6 7 8  reads the outputs of the 11 tokens back
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    blocks = attention_blocks.blocks
    outputs = [_attend(q, k, v, block, scaling, sliding_window) for block in blocks]
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return slots.index_select(0, attention_blocks.slot_of_token)[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the outputs [b * Lq, H, D] of the block's query slots, from tokens [N, H, D]."""
    mask = block.mask
    # A window that covers the whole block changes nothing, and the kernel without a mask is faster.
    if window is not None and block.keys.shape[1] > window:
        mask = block.sliding_window_mask(window)
    out = scaled_dot_product_attention(
        _gather_slots(q, block.queries),
        _gather_slots(k, block.keys),
        _gather_slots(v, block.keys),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _gather_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens [N, H, D] into slots [b, L]: [b, H, L, D]."""
    rows = tokens.index_select(0, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether packed rows give the same function of the weights as padded rows."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and layer_types <= _SUPPORTED_LAYER_TYPES
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention.

    Raises:
        ModelError: packed attention would not be exact for this model.
    """
    if not supports_packing(model):
        raise ModelError(
            f"{type(model).__name__} does not support packed rows: it does not look up its "
            "attention by name, or has other layers than full and sliding-window attention; use "
            "packed=False",
            path=model.config.name_or_path,
        )
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
