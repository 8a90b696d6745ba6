"""Attention of one new token of each row to its prompt, which rows share, and to its own tokens.

Keys and values of a prompt are read once for all its rows. The two parts of the softmax are joined
by the logarithms of their sums.

Transformers finds `decode_attention` under `ATTENTION_NAME`. It is `sdpa` unless the forward pass
carries a `prompt_cache`, as every pass after the prefill does.

Shapes: see `kv_cache.py`. g = H / Hk heads share a key head; Dv is the size of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from quadriga.models.architectures import architecture_of
from quadriga.rollout.hf.kv_cache import PromptRows, SharedPrompts, growing_cache, sees_all_tokens

ATTENTION_NAME = "quadriga_decode"
"""Name under which transformers finds `decode_attention`."""

CHANGED_AFTER_THE_CACHE = (
    "axk1", "deepseek_v2", "deepseek_v3", "diffllama", "glm4_moe_lite", "hrm_text", "jetmoe",
    "longcat_flash", "minicpm3", "youtu",
)  # fmt: skip
"""Architectures that attend to other keys or values than the cache returns for their layer."""

_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prompt_cache: SharedPrompts | None = None,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: query [b, H, 1, D] -> ([b, 1, H, Dv], None)."""
    if prompt_cache is None:
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    assert attention_mask is None and isinstance(module.layer_idx, int)
    assert others.get("softcap") is None and others.get("s_aux") is None
    layer = prompt_cache.growing[module.layer_idx]
    count, heads, _, size = query.shape
    key_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    scaled = (query * scale).view(count, key_heads, heads // key_heads, size)
    own, own_sum = _attend(scaled.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), None)
    prompt, prompt_sum = _attend_to_prompts(
        scaled, layer.prompt_keys, layer.prompt_values, prompt_cache.rows
    )
    # softmax over both parts is σ · prompt + (1 − σ) · own, where σ = e^p / (e^p + e^o) for the
    # logarithms p and o of the sums of exponentials.
    share = torch.sigmoid(prompt_sum - own_sum)
    joined = torch.lerp(own, prompt, share)
    return joined.view(count, 1, heads, -1), None


def _attend_to_prompts(
    scaled: Tensor, keys: Tensor, values: Tensor, rows: PromptRows
) -> tuple[Tensor, Tensor]:
    """Attend to prompts [p, Hk, P, D]; see `_attend`. The results are in the order of the rows."""
    prompts, key_heads = keys.shape[:2]
    group = scaled.shape[2]

    def by_prompt(x: Tensor) -> Tensor:
        """[b, Hk, g, D] -> [p · Hk, slots · g, D]"""
        slots = x.index_select(0, rows.row_of_slot).view(prompts, -1, *x.shape[1:])
        return slots.transpose(1, 2).reshape(prompts * key_heads, -1, x.shape[-1])

    def by_row(x: Tensor) -> Tensor:
        """[p · Hk, slots · g, D] -> [b · Hk, g, D]"""
        slots = x.view(prompts, key_heads, -1, group, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return slots.index_select(0, rows.slot_of_row).flatten(0, 1)

    bias = rows.bias
    if bias is not None:
        bias = bias[:, None].expand(-1, key_heads, -1, -1).flatten(0, 1)
    out, log_sum = _attend(by_prompt(scaled), keys.flatten(0, 1), values.flatten(0, 1), bias)
    return by_row(out), by_row(log_sum)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ + bias) v and the logarithm of the sum of exponentials.

    [n, m, D], [n, L, D], [n, L, Dv], [n, 1, L] -> [n, m, Dv], [n, m, 1].
    """
    scores = torch.bmm(query, keys.transpose(1, 2))
    if bias is not None:
        scores += bias
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.bmm(weights, values).div_(total), total.log_().add_(largest)


def use_decode_attention(module: PreTrainedModel) -> bool:
    """Switch `module` to `decode_attention` if it can, and return whether it has.

    It can if rows of the architecture are packed in training (each layer then takes its attention
    from transformers by name), every layer sees all tokens before the query, and attention receives
    what the cache returns. Scores of 16 bits would be rounded, so the model must compute in 32 or
    64. `tests/architectures` compares the numbers with a naive loop.
    """
    suitable = (
        architecture_of(module.config).rows == "packed"
        and module.config.model_type not in CHANGED_AFTER_THE_CACHE
        and module.config._attn_implementation == "sdpa"
        and module.dtype in (torch.float32, torch.float64)
        and sees_all_tokens(growing_cache(module.config))
    )
    if suitable:
        AttentionInterface.register(ATTENTION_NAME, decode_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        module.set_attn_implementation(ATTENTION_NAME)
    return suitable
