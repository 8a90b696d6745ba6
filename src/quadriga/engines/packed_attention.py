"""Causal attention over packed tokens, for every model that looks up its attention by name.

Every layer but attention works token by token and sees the N packed tokens once. Attention gathers
queries, keys and values into `AttentionBlocks` (the keys of a shared prompt into each of its rows),
runs the fused kernel, and reads each token's output back. A dense [N, N] mask, most of which would
be 0, is never made.

Transformers finds two functions under `ATTENTION_NAME`. The model calls `packed_mask` once for each
kind of layer (full, sliding window, chunks), and passes the result to `packed_attention` in each
layer of that kind. So the layer's mask says which tokens it attends to, whether or not the model
also passes the window to its attention function.

Shapes: N packed tokens, H heads, D head size. In a block: b rows, Lq query and Lk key slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from quadriga.errors import ModelError
from quadriga.models.architectures import architecture_of
from quadriga.parallel.attention_blocks import AttentionBlock, AttentionBlocks

ATTENTION_NAME = "quadriga_packed"
"""Name under which transformers finds `packed_attention` and `packed_mask`."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query position, key position) -> whether the query attends to the key. Index tensors
that broadcast, as `transformers.masking_utils` defines them."""


class LocalMask:
    """The mask of layers that attend to nearby tokens only.

    Args:
        function: says which keys a query attends to, from positions in their own row.
        size: rows of at most this many tokens are attended to completely.
    """

    def __init__(self, function: MaskFunction, size: int) -> None:
        self._function = function
        self._size = size
        self._masks: dict[int, tuple[AttentionBlock, Tensor]] = {}

    def of_block(self, block: AttentionBlock) -> Tensor | None:
        """Return the mask [b or 1, 1, Lq, Lk] of a block. All layers of this kind share it."""
        # A window that covers the whole block changes nothing, and the kernel without a mask is
        # faster.
        if block.keys.shape[1] <= self._size:
            return block.mask
        if id(block) not in self._masks:
            query = block.query_columns()[:, None, :, None]
            key = torch.arange(block.keys.shape[1], device=query.device)
            zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=query.device)
            mask = self._function(zero, zero, query, key[None, None, None])
            self._masks[id(block)] = (block, mask)  # keeps the block, so that its id stays valid
        return self._masks[id(block)][1]


def packed_mask(
    *, mask_function: MaskFunction, local_size: int | None = None, **unused: object
) -> LocalMask | None:
    """Return the mask of a kind of layers, as `AttentionMaskInterface` requires.

    None stands for plain causal attention.

    Raises:
        ModelError: the attention is neither causal over all tokens nor local.
    """
    plain: object = causal_mask_function  # transformers annotates its indices as int
    if mask_function is plain:
        return None
    if local_size is None:
        raise ModelError(
            "packed rows support causal attention over all tokens, a window or chunks; this model "
            "has another mask; use packed=False"
        )
    return LocalMask(mask_function, local_size)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LocalMask | None,
    *,
    attention_blocks: AttentionBlocks,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: [1, H, N, D] three times -> ([1, N, H, D], None).

    Transformers passes the arguments of the model's `forward` through, `attention_blocks` among
    them.

    Args:
        softcap: a score s becomes softcap · tanh(s / softcap).
        s_aux: [H], the score of an attention sink: a key that every query attends to and that has
            no value.
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
    outputs = []
    for block in attention_blocks.blocks:
        slots = (
            _gather_slots(q, block.queries),
            _gather_slots(k, block.keys),
            _gather_slots(v, block.keys),
        )
        mask = block.mask if attention_mask is None else attention_mask.of_block(block)
        if softcap is None and s_aux is None:
            out = scaled_dot_product_attention(
                *slots,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            out = _attend_to_scores(*slots, mask, scaling, softcap, s_aux)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, attention_blocks.slot_of_token)[None], None


def _attend_to_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
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
    if s_aux is not None:
        sink = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _gather_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens [N, H, D] into slots [b, L]: [b, H, L, D]."""
    rows = tokens.index_select(0, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


def supports_packing(model: PreTrainedModel) -> bool:
    """Return whether packed rows are known to be the same function of the weights as single rows.

    `quadriga.models.architectures` lists the architectures that were compared.
    """
    return architecture_of(model.config).rows == "packed"


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention.

    Raises:
        ModelError: packed attention would not be exact for this model.
    """
    if not supports_packing(model):
        raise ModelError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) is not known to give "
            "the same numbers with packed rows (docs/concepts/architectures.md); use packed=False",
            path=model.config.name_or_path,
        )
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)
    model.set_attn_implementation(ATTENTION_NAME)
