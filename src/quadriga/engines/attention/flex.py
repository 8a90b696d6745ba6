"""Attention by `torch.nn.attention.flex_attention`: compiled, with a block mask over packed tokens.

For calls that the flash kernel cannot compute: capped scores, sinks, chunks, float32. All tokens of
the micro-batch are one sequence, and the mask says which of them a token attends to. Blocks of 128
queries and 128 keys without a pair are left out, so the cost is about that of the rows. A [N, N]
tensor is never made.

Shapes: N packed tokens, M tokens after padding, H heads, Hk key heads, D head size, Dv size of a
value, T = M / 128 blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    flex_attention,
)
from torch.nn.functional import pad, scaled_dot_product_attention

from quadriga.engines.attention.masks import LocalMask, MaskKind, Scoring
from quadriga.parallel.attention_blocks import PackedRows

FlexAttention = Callable[..., tuple[Tensor, AuxOutput]]
"""`flex_attention` with `return_aux`."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query index, key index) -> the score to use."""

Signature = tuple[torch.dtype, int, int, int, int, bool, bool]
"""What a kernel is compiled for: dtype, heads, key heads, D, Dv, caps, whether it returns sums."""

BLOCK = 128
"""Tokens of a block."""

_SLICE = 2**24  # pairs of a query and a key that are looked at in one step

# The example of `parallel/packing.py`, with a window of 3 tokens. Row 1 has the prompt of row 0.
#
#   packed index     0  1  2  3  4  5  6  7  8  9 10
#   row              0  0  0  0  1  2  2  2  2  2  2
#   column           0  1  2  3  2  0  1  2  3  4  5
#
#   own_first        0  0  0  1  4  5  5  5  6  7  8     from here on, tokens of the own row
#   prompt_first     0  0  0  0  0  0  0  0  0  0  0     from here to `prompt_last`, tokens of the
#   prompt_last      0  0  0  0  2  0  0  0  0  0  0     prompt that was packed with an earlier row
#
# Token 4 is in column 2 and attends to columns 0 to 2: tokens 0 1 of the prompt, and itself.
# Token 3 is in column 3 and attends to columns 1 to 3: tokens 1 2 3.


class TokenRanges:
    """The tokens to which each packed token attends, for every kind of mask.

    N is rounded up to M: kernels for whole blocks are faster, and there are fewer shapes to compile
    for. A padding token attends to itself.
    """

    def __init__(self, rows: PackedRows, device: torch.device) -> None:
        self.tokens = len(rows.row)
        self.padded = max(-(-self.tokens // BLOCK), 2) * BLOCK  # one block is a shape of its own
        self._rows = rows
        self._device = device
        self._masks: dict[tuple[MaskKind, int], BlockMask] = {}

    def block_mask(self, mask: LocalMask | None) -> BlockMask:
        """Return the block mask of a kind of layers, which all of these layers share."""
        key: tuple[MaskKind, int] = ("causal", 0) if mask is None else (mask.kind, mask.size)
        if key not in self._masks:
            self._masks[key] = _block_mask(*self.ranges(*key))
        return self._masks[key]

    def ranges(self, kind: MaskKind, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return `own_first`, `prompt_first` and `prompt_last`, each [M] int32.

        Token i attends to the tokens j ≤ i with own_first[i] ≤ j, and to those with
        prompt_first[i] ≤ j < prompt_last[i].
        """
        rows, row = self._rows, self._rows.row
        count = len(rows.prompt_owner)
        first_packed = torch.searchsorted(row, torch.arange(count))
        shared = rows.prompt_owner != torch.arange(count)
        # Tokens of a row whose prompt was packed with an earlier row begin in a later column.
        first_column = torch.where(shared, rows.prompt_length, 0)
        lowest = _lowest_column(rows.column, kind, size)
        own_first = first_packed[row] + (lowest - first_column[row]).clamp(min=0)
        prompt = torch.where(shared, first_packed[rows.prompt_owner], 0)
        prompt_last = prompt + first_column
        prompt_first = torch.minimum(prompt[row] + lowest, prompt_last[row])
        more = self.padded - self.tokens
        own_first = torch.cat([own_first, torch.arange(self.tokens, self.padded)])
        found = (own_first, pad(prompt_first, (0, more)), pad(prompt_last[row], (0, more)))
        a, b, c = (x.to(torch.int32).to(self._device) for x in found)
        return a, b, c


def attend_tokens(
    query: Tensor, key: Tensor, value: Tensor, rows: TokenRanges, scoring: Scoring
) -> Tensor:
    """Attend within rows: [1, H, N, D], [1, Hk, N, D], [1, Hk, N, Dv] -> [N, H, Dv]."""
    more = rows.padded - rows.tokens
    q, k, v = (pad(x, (0, 0, 0, more)) if more else x for x in (query, key, value))
    out, log_sum = _run(q, k, v, rows, scoring)
    if scoring.sinks is not None:
        # A sink is a key with score s and without a value. With Z the sum of exp(score) over the
        # other keys, each weight exp(score) / Z becomes exp(score) / (Z + exp(s)): it is multiplied
        # by Z / (Z + exp(s)) = sigmoid(log Z − s).
        share = torch.sigmoid(log_sum - scoring.sinks.to(log_sum.dtype)[None, :, None])
        out = out * share[..., None].to(out.dtype)
    return out[0].transpose(0, 1)[: rows.tokens]


def _run(
    q: Tensor, k: Tensor, v: Tensor, rows: TokenRanges, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return outputs [1, H, M, Dv] and the log-sum [1, H, M] of exp(score), if it is requested."""
    grouped, softcap = q.shape[1] != k.shape[1], scoring.softcap
    with_sum = scoring.sinks is not None
    if q.is_meta:
        # The memory plan: a fused kernel keeps the same tensors for its backward pass.
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scoring.scaling, enable_gqa=grouped
        )
        return out, q.new_empty(q.shape[:3], dtype=torch.float32)
    sizes = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
    out, extra = compiled((q.dtype, *sizes, softcap is not None, with_sum))(
        q, k, v,
        score_mod=None if softcap is None else _soft_cap(softcap, q.dtype, q.device),
        block_mask=rows.block_mask(scoring.mask),
        scale=scoring.scaling,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=with_sum),
    )  # fmt: skip
    return out, out.new_empty(0) if extra.lse is None else extra.lse


@cache
def compiled(signature: Signature) -> FlexAttention:
    """Return the kernel that is compiled for calls of one signature, for any number of tokens.

    Torch keeps at most 8 compiled forms of a code object, and the models of a process (policy,
    reference, critic) would share them. So each signature has a copy of the code. Each needs two
    forms, with and without gradients.

    Without compilation, torch 2.13 computes wrong gradients of capped scores in a layer with
    activation checkpointing.
    """
    code = _attend.__code__.replace(co_name=f"attend_{abs(hash(signature))}")
    copy = FunctionType(code, _attend.__globals__)
    # `fullgraph`: an error instead of the function itself, if a call cannot be compiled.
    kernel: FlexAttention = torch.compile(copy, dynamic=True, fullgraph=True)
    return kernel


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    return_aux: AuxRequest,
) -> tuple[Tensor, AuxOutput]:
    return flex_attention(
        query, key, value,
        score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa,
        return_aux=return_aux,
    )  # fmt: skip


@cache
def _soft_cap(cap: float, dtype: torch.dtype, device: torch.device) -> ScoreMod:
    """Return the function that caps a score at ±`cap`. One object for all layers."""
    # A tensor, because the compiler cannot make a number that a function closes over dynamic.
    bound = torch.tensor(cap, dtype=torch.promote_types(dtype, torch.float32), device=device)

    def soft_cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return torch.tanh(score / bound) * bound

    return soft_cap


def _lowest_column(column: Tensor, kind: MaskKind, size: int) -> Tensor:
    """Return the first column of its row that a token in `column` attends to."""
    if kind == "window":
        return (column - size + 1).clamp(min=0)
    if kind == "chunk":
        return column // size * size
    assert kind == "causal", kind
    return torch.zeros_like(column)


def _block_mask(own_first: Tensor, prompt_first: Tensor, prompt_last: Tensor) -> BlockMask:
    """Return the block mask of ranges [M]. Slices of queries are looked at, never all M · M pairs.

    One function is the mask of all kinds of layers and of all micro-batches, so it is compiled
    once.
    """

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= prompt_first[query]) & (key < prompt_last[query])
        return (key <= query) & ((key >= own_first[query]) | in_prompt)

    tokens, device = len(own_first), own_first.device
    zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
    index = torch.arange(tokens, dtype=torch.int32, device=device)
    some, every = [], []
    for queries in torch.split(index, max(_SLICE // tokens // BLOCK, 1) * BLOCK):
        pairs = attends(zero, zero, queries[:, None], index[None])
        blocks = pairs.view(len(queries) // BLOCK, BLOCK, tokens // BLOCK, BLOCK)
        some.append(blocks.any(3).any(1))
        every.append(blocks.all(3).all(1))
    whole = torch.cat(every)
    partial = torch.cat(some) & ~whole
    return BlockMask.from_kv_blocks(
        *_block_table(partial),
        *_block_table(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=attends,
        seq_lengths=(tokens, tokens),
    )


def _block_table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for [T, T] bool the number of blocks of each row of blocks, and which: those first.

    Shapes [1, 1, T] and [1, 1, T, T], int32.
    """
    count = blocks.sum(1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return count[None, None], order.to(torch.int32)[None, None].contiguous()
