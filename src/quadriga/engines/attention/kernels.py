"""Causal attention over packed rows: the masks of layers, and the kernels `sdpa`, `varlen`, `flex`.

Every layer but attention works token by token and sees the N packed tokens once. Attention reads
the rows from `AttentionRows`, which each forward pass carries to all layers.

Transformers finds two functions under `ATTENTION_NAME`. The model calls `packed_mask` once for each
kind of layer (full, sliding window, chunks), and passes the result to `packed_attention` in each
layer of that kind. So the layer's mask says which tokens it attends to, whether or not the model
also passes the window to its attention function.

`LocalMask` says which tokens of its own row a token attends to. Each kernel reads the rows of a
micro-batch in an arrangement of its own:

- `attend_blocks` (sdpa) is right on every device, in every dtype and for every mask. Queries, keys
  and values are gathered into `AttentionBlocks` (the keys of a shared prompt into each of its
  rows), and each token's output is read back. A dense [N, N] mask, most of which would be 0, is
  never made.
- `attend_lengths` (varlen: the flash kernel for rows of different lengths; CUDA, 16 bits) is one
  launch. The kernel takes any number of queries and keys for each row and aligns their *ends*: with
  3 queries and 5 keys, the first query attends to keys 0 1 2, the last one to all five. So a row
  whose prompt was packed with an earlier row has the tokens of its response as queries and those of
  the whole row as keys, and neither a mask nor padding is needed.
- `attend_tokens` (flex attention, compiled) is for calls that the flash kernel cannot compute:
  capped scores, sinks, chunks, float32. All tokens of the micro-batch are one sequence, and a block
  mask says which of them a token attends to. Blocks of 128 queries and 128 keys without a pair are
  left out, so the cost is about that of the rows.

Several ranks can have the tokens in parts, n tokens each. Before attention, ranks of sequence
parallelism exchange tokens for heads (DeepSpeed-Ulysses, arXiv 2309.14509), and ranks of context
parallelism gather keys and values:

    of a rank                queries              keys and values
    before              n tokens, H heads      n tokens, Hk heads
    exchange            N / c,    H / s        N / c,    Hk / s
    gather              N / c,    H / s        N,        Hk / s
    after               n tokens, H heads

n = N / (c · s) with c ranks of context and s of sequence parallelism.

Shapes: N packed tokens, M slots, H heads, Hk key heads, D head size, Dv size of a value. In a
block: b rows, Lq query and Lk key slots. For flex: M tokens after padding, T = M / 128 blocks.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import AttentionInterface

from quadriga.errors import ModelError
from quadriga.models.architectures import architecture_of
from quadriga.parallel import token_exchange
from quadriga.parallel.attention_blocks import (
    AttentionBlock,
    AttentionBlocks,
    PackedRows,
    QueryColumns,
    query_blocks,
    similar_length_blocks,
    whole_row_blocks,
)
from quadriga.parallel.model_ranks import ModelRanks

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query position, key position) -> whether the query attends to the key. Index tensors
that broadcast, as `transformers.masking_utils` defines them."""

MaskKind = Literal["causal", "window", "chunk", "other"]
"""Which keys k a query q of the same row attends to. Causal: k ≤ q. Window of size w: also
k > q − w. Chunk of size w: also k // w = q // w. Other: what a function says."""


Kernel = Literal["sdpa", "varlen", "flex"]


class LocalMask:
    """The mask of layers that attend to nearby tokens only.

    Args:
        function: says which keys a query attends to, from positions in their own row.
        size: rows of at most this many tokens are attended to completely.
    """

    def __init__(self, function: MaskFunction, size: int) -> None:
        self._function = function
        self.size = size
        self._masks: dict[int, tuple[AttentionBlock, Tensor]] = {}

    @cached_property
    def kind(self) -> MaskKind:
        """The kind of mask that the function computes."""
        found = _structure(self._function)
        if found == _structure(sliding_window_causal_mask_function(self.size)):
            return "window"
        no_padding = torch.zeros(1, dtype=torch.int64)
        if found == _structure(chunked_causal_mask_function(self.size, no_padding)):
            return "chunk"
        return "other"

    def of_block(self, block: AttentionBlock) -> Tensor | None:
        """Return the mask [b or 1, 1, Lq, Lk] of a block. All layers of this kind share it."""
        # A window that covers the whole block changes nothing, and the kernel without a mask is
        # faster.
        if block.keys.shape[1] <= self.size:
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


def _structure(value: object) -> object:
    """Return the code of a function and of the functions that it closes over, and their numbers.

    Two mask functions with equal structures compute the same mask of rows without padding. Tensors
    are left out: the only one is the padding of chunks, which packed rows do not have.
    """
    # sliding_window_causal_mask_function(8) is a closure over (a closure over 8, causal):
    #
    #   (code of and_mask, ((code of the window, (8,)), (code of causal, ())))
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, tuple(_structure(c) for c in cells if not isinstance(c, Tensor))
    if isinstance(value, tuple):
        return tuple(map(_structure, value))
    return value


@dataclass(frozen=True)
class Scoring:
    """How the scores of a call become weights.

    Attributes:
        mask: None: each token attends to all tokens of its row up to itself.
        scaling: the factor of scores; None: 1 / √D.
        softcap: a score s becomes softcap · tanh(s / softcap).
        sinks: [H], the score of an attention sink: a key that every query attends to and that has
            no value.
    """

    mask: LocalMask | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """What a call computes, as far as a kernel may not support it.

    Attributes:
        dtype: of queries, keys and values.
        heads, key_heads: of queries, of keys and values.
        size, value_size: elements of a query or key, and of a value, in one head.
        mask: the kind of mask.
        softcap: whether scores are capped.
        sinks: whether there are attention sinks.
        part: whether the queries are a part of the tokens (context parallelism).
    """

    dtype: torch.dtype
    heads: int
    key_heads: int
    size: int
    value_size: int
    mask: MaskKind = "causal"
    softcap: bool = False
    sinks: bool = False
    part: bool = False


KernelOf = Callable[[AttentionCall], Kernel]


def sdpa_only(call: AttentionCall) -> Kernel:
    """Compute every call by `sdpa`."""
    return "sdpa"


def gather_tokens(tokens: Tensor, slots: Tensor) -> Tensor:
    """Return `tokens` [N, H, D] at the indices `slots` [M]: [M, H, D].

    The keys of a shared prompt are read by each of its rows, and their gradients are added. In 16
    bits each addition would round (64 rows: 64 roundings of 0.4 % in bfloat16), so they are added
    in float32.
    """
    if tokens.dtype.itemsize >= 4:
        return tokens.index_select(0, slots)
    gathered: Tensor = _Gather.apply(tokens, slots)  # type: ignore[no-untyped-call]  # of torch
    return gathered


class _Gather(torch.autograd.Function):
    """`index_select` whose backward pass adds in float32."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = len(tokens)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        sums = grad.new_zeros((ctx.size, *grad.shape[1:]), dtype=torch.float32)
        return sums.index_add_(0, slots, grad.float()).to(grad.dtype), None


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, rows: AttentionBlocks, scoring: Scoring
) -> Tensor:
    """Attend within rows: [N, H, D] three times -> [N, H, D]."""
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
        seen = block.mask if scoring.mask is None else scoring.mask.of_block(block)
        if scoring.softcap is None and scoring.sinks is None:
            out = scaled_dot_product_attention(
                *slots, attn_mask=seen, is_causal=seen is None, scale=scoring.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        else:
            out = _attend_to_scores(*slots, seen, scoring)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, rows.slot_of_token)


def _attend_to_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend with capped scores or sinks, which the fused kernel cannot compute: [b, H, Lq, D].

    The scores [b, H, Lq, Lk] exist as a whole.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scoring.scaling or q.shape[-1] ** -0.5)
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _gather_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather tokens [N, H, D] into slots [b, L]: [b, H, L, D]."""
    rows = gather_tokens(tokens, slots.flatten())
    return rows.view(*slots.shape, *tokens.shape[1:]).transpose(1, 2)


SIZE_UNIT = 8
"""The kernel computes head sizes that are a multiple of this."""

# The example of `parallel/packing.py`: row 1 uses the prompt of row 0.
#
#            queries          keys                  query_ends   key_ends
#   row 0    0 1 2 3          0 1 2 3                    4           4
#   row 1    4                0 1 4                      5           7
#   row 2    5 6 7 8 9 10     5 6 7 8 9 10              11          13
#
# The queries are the packed tokens in their order. `keys` = 0 1 2 3 0 1 4 5 6 7 8 9 10.


class RowLengths:
    """The queries and the keys of each row.

    Args:
        device: of the tensors.
        queries_of: the packed tokens that are queries; None: all.

    Attributes:
        query_ends: [b + 1] int32, the packed index behind the last query of each row, after a 0.
        key_ends: [b + 1] int32, the same for the keys.
        most_queries, most_keys: at least as many as any row has.
        keys: [M] int64, the packed index of each key. None: the keys are the queries.
    """

    def __init__(
        self, rows: PackedRows, device: torch.device, queries_of: range | None = None
    ) -> None:
        columns = QueryColumns.of(rows, queries_of or range(len(rows.row)))
        queries, length = columns.end - columns.first, columns.end
        self.query_ends, self.key_ends = (_ends(x).to(device) for x in (queries, length))
        # With at most one query in each row, kernels for generation would be chosen.
        self.most_queries, self.most_keys = (max(int(x.max()), 2) for x in (queries, length))
        self.keys: Tensor | None = None
        # Each row has as many keys as queries or more. If the sums are equal, all are equal.
        if int(length.sum()) > len(rows.row) or queries_of is not None:
            tokens = rows.token_index[columns.rows]
            self.keys = tokens[torch.arange(tokens.shape[1]) < length[:, None]].to(device)


def attend_lengths(q: Tensor, k: Tensor, v: Tensor, rows: RowLengths, scoring: Scoring) -> Tensor:
    """Attend within rows: [N, H, D], [N, Hk, D], [N, Hk, Dv] -> [N, H, Dv]."""
    window = None if scoring.mask is None else scoring.mask.size
    if rows.keys is not None:
        k, v = gather_tokens(k, rows.keys), gather_tokens(v, rows.keys)
    size, value_size = q.shape[-1], v.shape[-1]
    width = -(-max(size, value_size) // SIZE_UNIT) * SIZE_UNIT
    # Elements that are 0 in queries and keys add 0 to a score, and those of values are cut off.
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    before = -1 if window is None or window >= rows.most_keys else window - 1
    out = varlen_attn(
        q, k, v, rows.query_ends, rows.key_ends, rows.most_queries, rows.most_keys,
        scale=scoring.scaling or size**-0.5,
        window_size=(before, 0),  # keys before the query's own, and after it; −1: any number
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a pair if auxiliary outputs are requested
    return out[..., :value_size]


def _ends(lengths: Tensor) -> Tensor:
    """Return the cumulative sums [b + 1] int32 of `lengths` [b], from 0."""
    return pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


FlexAttention = Callable[..., tuple[Tensor, AuxOutput]]
"""`flex_attention` with `return_aux`."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, batch, head, query index, key index) -> the score to use."""

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
    out, extra = compiled()(
        q, k, v,
        score_mod=None if softcap is None else _soft_cap(softcap, q.dtype, q.device),
        block_mask=rows.block_mask(scoring.mask),
        scale=scoring.scaling,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=with_sum),
    )  # fmt: skip
    return out, out.new_empty(0) if extra.lse is None else extra.lse


@cache
def compiled() -> FlexAttention:
    """Return flex attention, compiled for any number of tokens.

    Without compilation, torch 2.13 computes wrong gradients of capped scores in a layer with
    activation checkpointing.
    """
    # Torch keeps at most 8 compiled forms of a function. The models of a process (policy,
    # reference, critic) need two for each dtype and size of heads: with and without gradients.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # `fullgraph`: an error instead of the function itself, if a call cannot be compiled.
    return cast(FlexAttention, torch.compile(flex_attention, dynamic=True, fullgraph=True))


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
        *_block_table(partial), *_block_table(whole), BLOCK_SIZE=BLOCK, mask_mod=attends,
        seq_lengths=(tokens, tokens),
    )  # fmt: skip


def _block_table(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for [T, T] bool the number of blocks of each row of blocks, and which: those first.

    Shapes [1, 1, T] and [1, 1, T, T], int32.
    """
    count = blocks.sum(1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=1, descending=True, stable=True)
    return count[None, None], order.to(torch.int32)[None, None].contiguous()


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
        self.queries: range | None = None  # the packed tokens whose queries this rank has
        if self.ranks.context.size > 1:
            size, index = len(rows.row) // self.ranks.context.size, self.ranks.context.index
            self.queries = range(index * size, (index + 1) * size)
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
        return RowLengths(self._rows, self._device, self.queries)

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
    heads = ranks.sequence
    if heads.size > 1:
        k, v = (repeated_heads(x, q.shape[1], heads.size) for x in (k, v))
        q, k, v = (token_exchange.exchange_heads(x, heads) for x in (q, k, v))
        if s_aux is not None:  # the sinks of the heads of this rank
            s_aux = s_aux.chunk(heads.size)[heads.index]
    k, v = (token_exchange.gather_tokens(x, ranks.context) for x in (k, v))
    out = attend(q, k, v, attention_rows, Scoring(attention_mask, scaling, softcap, s_aux))
    return token_exchange.exchange_tokens(out, heads)[None], None  # [N / c, H / s, D] -> [n, H, D]


def attend(q: Tensor, k: Tensor, v: Tensor, rows: AttentionRows, scoring: Scoring) -> Tensor:
    """Attend with the kernel of the call: [N or N / c, H, D], [N, Hk, D] twice -> as queries.

    With c ranks of context parallelism, the queries are those of `rows.queries`.
    """
    kernel = rows.kernel_of(
        AttentionCall(
            dtype=q.dtype, heads=q.shape[1], key_heads=k.shape[1], size=q.shape[-1],
            value_size=v.shape[-1], mask="causal" if scoring.mask is None else scoring.mask.kind,
            softcap=scoring.softcap is not None, sinks=scoring.sinks is not None,
            part=rows.queries is not None,
        )
    )  # fmt: skip
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


def repeated_heads(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat key heads [n, Hk, D] so that they divide over `size` ranks, each with its queries."""
    # 8 heads, 2 key heads a b, 4 ranks: a a b b. Ranks 0 and 1 have queries of a, 2 and 3 of b.
    times = size // math.gcd(x.shape[1], size)
    assert heads % size == 0 and heads % (x.shape[1] * times) == 0, (heads, x.shape[1], size)
    return x if times == 1 else x.repeat_interleave(times, 1)
