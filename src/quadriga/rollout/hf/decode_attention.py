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

from quadriga.errors import RolloutError
from quadriga.models.architectures import architecture_of
from quadriga.rollout.hf.kv_cache import (
    PromptCache,
    PromptRows,
    growing_cache,
    sees_all_tokens,
)

ATTENTION_NAME = "quadriga_decode"
"""Name under which transformers finds `decode_attention`."""

_sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prompt_cache: PromptCache | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: query [b, H, 1, D] -> ([b, 1, H, Dv], None).

    Raises:
        RolloutError: the model asks for more than softmax(scores) over all tokens.
    """
    if prompt_cache is None:
        return _sdpa(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap,
            s_aux=s_aux, **others,
        )  # fmt: skip
    if attention_mask is not None or softcap is not None or s_aux is not None:
        raise _unsupported("masks, capped scores or sinks")
    layer = prompt_cache.layer_of(key, value)
    count, heads, _, size = query.shape
    key_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    scaled = (query * scale).view(count, key_heads, heads // key_heads, size)
    own, own_sum = _attend(scaled.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), None)
    prompt_key, prompt_value = layer.prompt.columns()
    prompt, prompt_sum = _attend_to_prompts(scaled, prompt_key, prompt_value, prompt_cache.rows)
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
    from transformers by name), every layer sees all tokens before the query, and an example shows
    that attention receives what the cache returns, without a mask. Scores of 16 bits would be
    rounded, so the model must compute in 32 or 64.
    """
    suitable = (
        architecture_of(module.config).rows == "packed"
        and module.config._attn_implementation == "sdpa"
        and module.dtype in (torch.float32, torch.float64)
        and sees_all_tokens(growing_cache(module.config))
    )
    if not suitable:
        return False
    AttentionInterface.register(ATTENTION_NAME, decode_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    module.set_attn_implementation(ATTENTION_NAME)
    if _decodes_example(module):
        return True
    module.set_attn_implementation("sdpa")
    return False


def _decodes_example(module: PreTrainedModel) -> bool:
    """Return whether every layer attends by `decode_attention` to what the cache returned."""
    cache = PromptCache(module.config)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=module.device)
    row = ids[0, :1]
    with torch.no_grad():
        module(input_ids=ids, past_key_values=cache, use_cache=True)
        cache.begin_rows(PromptRows(1, row, row, row, None))
        try:
            module(
                input_ids=ids[:, :1], past_key_values=cache, use_cache=True, prompt_cache=cache,
                position_ids=ids[:, :1] + 2,
            )  # fmt: skip
        except RolloutError:
            return False
    return cache.attended == set(cache.parts)


def _unsupported(what: str) -> RolloutError:
    return RolloutError(
        f"the model needs {what}, which attention to shared prompts does not have",
        engine="hf",
        method="generate",
    )
