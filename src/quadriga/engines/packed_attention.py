"""Causal attention over a packed row of tokens, for any model that takes its attention by name.

Everything but attention works token by token, so it sees the N packed tokens once. Attention
spreads queries, keys and values into the blocks of a `RowLayout` (keys of a prompt that rows share
go to each of them), runs the fused kernel, and reads each token's output back. A dense [N, N]
mask, which is mostly empty, is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quadriga.errors import ModelError
from quadriga.parallel.row_layout import AttentionBlock, RowLayout

PACKED = "quadriga_packed"
_LAYERS_THAT_ROW_LAYOUT_FITS = {"full_attention", "sliding_attention"}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_layout: RowLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, H, N, D] queries, keys and values -> ([1, N, H, D], None)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = [_attend(q, k, v, block, scaling, sliding_window) for block in row_layout.blocks]
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return slots.index_select(0, row_layout.slot_of_token)[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[N, H, D] tokens -> [b * Lq, H, D] outputs of the block's query slots."""
    mask = block.seen
    if window is not None and block.keys.shape[1] > window:
        mask = block.window_mask(window)
    out = scaled_dot_product_attention(
        _spread(q, block.queries),
        _spread(k, block.keys),
        _spread(v, block.keys),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def _spread(tokens: Tensor, slots: Tensor) -> Tensor:
    """[N, H, D] by [b, L] -> [b, H, L, D]."""
    rows = tokens.index_select(0, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


def supports_packing(model: PreTrainedModel) -> bool:
    """Whether packed rows give this model the same function as padded rows do."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and layers <= _LAYERS_THAT_ROW_LAYOUT_FITS
        and getattr(config, "attn_logit_softcapping", None) is None
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention. Raises `ModelError` where that would not be exact."""
    if not supports_packing(model):
        raise ModelError(
            f"{type(model).__name__} does not take its attention by name, or uses layers that "
            "packed rows do not fit; use the padded forward",
            path=model.config.name_or_path,
        )
    AttentionInterface.register(PACKED, packed_attention)
    model.set_attn_implementation(PACKED)
