"""Causal attention over packed tokens, for every model that looks up its attention by name.

Every layer but attention works token by token and sees the N packed tokens once. Attention reads
the rows from `AttentionRows`, which each forward pass carries to all layers.

Transformers finds two functions under `ATTENTION_NAME`. The model calls `packed_mask` once for each
kind of layer (full, sliding window, chunks), and passes the result to `packed_attention` in each
layer of that kind. So the layer's mask says which tokens it attends to, whether or not the model
also passes the window to its attention function.

Shapes: N packed tokens, H heads, Hk key heads, D head size.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from quadriga.engines.attention.blocks import attend_blocks
from quadriga.engines.attention.choice import AttentionCall, KernelOf
from quadriga.engines.attention.flex import TokenRanges, attend_tokens
from quadriga.engines.attention.masks import LocalMask, packed_mask
from quadriga.engines.attention.token_split import (
    after_attention,
    before_attention,
    own_sinks,
    query_range,
)
from quadriga.engines.attention.varlen import RowLengths, attend_lengths
from quadriga.errors import ModelError
from quadriga.models.architectures import architecture_of
from quadriga.parallel.attention_blocks import (
    AttentionBlocks,
    PackedRows,
    query_blocks,
    similar_length_blocks,
    whole_row_blocks,
)
from quadriga.parallel.model_parallel.model_ranks import ModelRanks

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
    them.

    Args:
        softcap: a score s becomes softcap · tanh(s / softcap).
        s_aux: [H], the score of an attention sink: a key that every query attends to and that has
            no value.
    """
    ranks = attention_rows.ranks
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = before_attention(q, k, v, ranks)
    out = attend(
        q, k, v, attention_rows,
        mask=attention_mask, scaling=scaling, softcap=softcap, sinks=own_sinks(s_aux, ranks),
    )  # fmt: skip
    return after_attention(out, ranks)[None], None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: AttentionRows,
    *,
    mask: LocalMask | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with the kernel of the call: [N or N / c, H, D], [N, Hk, D] twice -> as queries.

    With c ranks of context parallelism, the queries are those of `rows.queries`.
    """
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    part = rows.queries is not None
    call = AttentionCall.of(query, key, value, mask, softcap, sinks, part=part)
    kernel = rows.kernel_of(call)
    if kernel == "flex":
        return attend_tokens(
            query, key, value, rows.ranges,
            mask=mask, scaling=scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    if kernel == "varlen":
        window = None if mask is None else mask.size
        return attend_lengths(q, k, v, rows.lengths, window=window, scaling=scaling)
    return attend_blocks(
        q, k, v, rows.blocks, mask=mask, scaling=scaling, softcap=softcap, sinks=sinks
    )


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
