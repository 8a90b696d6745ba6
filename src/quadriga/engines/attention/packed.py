"""Causal attention over packed tokens, for every model that looks up its attention by name.

Every layer but attention works token by token and sees the N packed tokens once. Attention reads
the rows from `AttentionRows`, which each forward pass carries to all layers.

Transformers finds two functions under `ATTENTION_NAME`. The model calls `packed_mask` once for each
kind of layer (full, sliding window, chunks), and passes the result to `packed_attention` in each
layer of that kind. So the layer's mask says which tokens it attends to, whether or not the model
also passes the window to its attention function.

Several ranks can have the tokens in parts, n tokens each. Before attention, ranks of sequence
parallelism exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509), and ranks of context
parallelism gather keys and values:

    of a rank                queries              keys and values
    before              n tokens, H heads      n tokens, Hk heads
    exchange            N / c,    H / s        N / c,    Hk / s
    gather              N / c,    H / s        N,        Hk / s
    after               n tokens, H heads

n = N / (c · s) with c ranks of context and s of sequence parallelism.

Shapes: N packed tokens, H heads, Hk key heads, D head size.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from quadriga.engines.attention.kernels import (
    AttentionCall,
    KernelOf,
    LocalMask,
    RowLengths,
    Scoring,
    TokenRanges,
    attend_blocks,
    attend_lengths,
    attend_tokens,
    packed_mask,
)
from quadriga.errors import ModelError
from quadriga.models.architectures import architecture_of
from quadriga.parallel.attention_blocks import (
    AttentionBlocks,
    PackedRows,
    query_blocks,
    similar_length_blocks,
    whole_row_blocks,
)
from quadriga.parallel.model_ranks import ModelRanks
from quadriga.parallel.token_exchange import (
    exchange_heads,
    exchange_tokens,
    gather_tokens,
)

ATTENTION_NAME = "quadriga_packed"
"""Name under which transformers finds `packed_attention` and `packed_mask`."""


class AttentionRows:
    """The rows of a packed micro-batch, in the arrangements that the kernels read.

    An arrangement is made when the first layer needs it, and all layers share it.

    Args:
        rows: which packed tokens make up each row, on the CPU.
        device: where attention is computed.
        kernel_of: the kernel of each call.
        split: whether `sdpa` computes rows of similar length in blocks of their own.
        ranks: the ranks that have the tokens in parts, of equal length.
    """

    def __init__(
        self,
        rows: PackedRows,
        device: torch.device,
        kernel_of: KernelOf,
        *,
        split: bool,
        ranks: ModelRanks | None = None,
    ) -> None:
        self.kernel_of = kernel_of
        self.ranks = ModelRanks() if ranks is None else ranks
        self.queries = query_range(len(rows.row), self.ranks)
        self._rows = rows
        self._device = device
        self._split = split

    @cached_property
    def blocks(self) -> AttentionBlocks:
        """The arrangement of `sdpa`."""
        if self.queries is not None:
            return query_blocks(self._rows, self.queries).to(self._device)
        arrange = similar_length_blocks if self._split else whole_row_blocks
        return arrange(self._rows).to(self._device)

    @cached_property
    def lengths(self) -> RowLengths:
        """The arrangement of `varlen`."""
        return RowLengths.of(self._rows, self._device, self.queries)

    @cached_property
    def ranges(self) -> TokenRanges:
        """The arrangement of `flex`."""
        return TokenRanges(self._rows, self._device)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LocalMask | None,
    *,
    attention_rows: AttentionRows,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Attend as `AttentionInterface` requires: [1, H, N, D] three times -> ([1, N, H, D], None).

    Transformers passes the arguments of the model's `forward` through, `attention_rows` among
    them. See `Scoring` for the arguments; `s_aux` are the sinks.
    """
    ranks = attention_rows.ranks
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = before_attention(q, k, v, ranks)
    if s_aux is not None and ranks.sequence.size > 1:  # the sinks of the heads of this rank
        s_aux = s_aux.chunk(ranks.sequence.size)[ranks.sequence.index]
    out = attend(q, k, v, attention_rows, Scoring(attention_mask, scaling, softcap, s_aux))
    return exchange_tokens(out, ranks.sequence)[None], None  # [N / c, H / s, D] -> [n, H, D]


def attend(q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows, scoring: Scoring) -> Tensor:
    """Attend with the kernel of the call: [N or N / c, H, D], [N, Hk, D] twice -> as queries.

    With c ranks of context parallelism, the queries are those of `rows.queries`.
    """
    kernel = rows.kernel_of(AttentionCall.of(q, k, v, scoring, part=rows.queries is not None))
    if kernel == "flex":
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend_tokens(query, key, value, rows.ranges, scoring)
    if kernel == "varlen":
        return attend_lengths(q, k, v, rows.lengths, scoring)
    return attend_blocks(q, k, v, rows.blocks, scoring)


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


def query_range(tokens: int, ranks: ModelRanks) -> range | None:
    """Return the packed tokens whose queries a rank has in attention; None: all of them."""
    if ranks.context.size == 1:
        return None
    size = tokens // ranks.context.size
    return range(ranks.context.index * size, (ranks.context.index + 1) * size)


def before_attention(
    query: Tensor, key: Tensor, value: Tensor, ranks: ModelRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange and gather what attention needs: [n, H, D] and [n, Hk, D] twice, as above."""
    sequence = ranks.sequence
    if sequence.size > 1:
        key, value = (repeated_heads(x, query.shape[1], sequence.size) for x in (key, value))
        query, key, value = (exchange_heads(x, sequence) for x in (query, key, value))
    return query, gather_tokens(key, ranks.context), gather_tokens(value, ranks.context)


def repeated_heads(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat key heads [n, Hk, D] so that they divide over `size` ranks, each with its queries."""
    # 8 heads, 2 key heads a b, 4 ranks: a a b b. Ranks 0 and 1 have queries of a, 2 and 3 of b.
    times = size // math.gcd(x.shape[1], size)
    assert heads % size == 0 and heads % (x.shape[1] * times) == 0, (heads, x.shape[1], size)
    return x if times == 1 else x.repeat_interleave(times, 1)
