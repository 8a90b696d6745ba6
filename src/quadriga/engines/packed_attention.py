"""Causal attention over a packed row of tokens, for any model that takes its attention by name.

Everything but attention works token by token, so it sees the N packed tokens once. Attention
spreads queries, keys and values into rows [B, L] (a prompt that rows share is spread to each of
them), runs the plain causal kernel, and reads each token's output back. A dense [N, N] mask, which
is mostly empty, is never made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from quadriga.errors import ModelError
from quadriga.parallel.packing import RowLayout

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
    slots = row_layout.token_of_slot
    q, k, v = (_spread(x, slots) for x in (query, key, value))
    mask = _window_mask(slots, sliding_window)
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    tokens = out.transpose(1, 2).flatten(0, 1).index_select(0, row_layout.slot_of_token)
    return tokens[None], None


def _spread(x: Tensor, slots: Tensor) -> Tensor:
    tokens = x[0].transpose(0, 1)
    rows = tokens.index_select(0, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


def _window_mask(slots: Tensor, window: int | None) -> Tensor | None:
    longest = slots.shape[1]
    if window is None or longest <= window:
        return None
    column = torch.arange(longest, device=slots.device)
    distance = column[:, None] - column[None, :]
    return (distance >= 0) & (distance < window)


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
