"""Packed rows for the attention kernels, a naive loop over them, and a naive flash kernel."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from quadriga.engines.attention.kernels import AttentionRows, Kernel, LocalMask, packed_attention
from quadriga.parallel.attention_blocks import PackedRows
from quadriga.parallel.packing import pack_rows
from row_cases import rows_of

CPU = torch.device("cpu")
# (prompt number, prompt tokens, response tokens) of each row
ROWS = {
    "shared": [(0, 3, 4), (0, 3, 1), (1, 5, 2), (0, 3, 6), (1, 5, 3), (2, 1, 5)],
    "own prompts": [(0, 3, 4), (1, 1, 1), (2, 6, 2)],
    "one row": [(0, 4, 5)],
    "one group": [(0, 4, 2), (0, 4, 3), (0, 4, 1)],
    "one token": [(0, 1, 0)],
    "empty responses": [(0, 3, 0), (0, 3, 2), (1, 2, 0), (0, 3, 0)],
    "one response token each": [(0, 2, 1), (0, 2, 1)],
    "more than two blocks": [(0, 100, 40), (0, 100, 60), (1, 90, 30), (1, 90, 7)],
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `local` is the size of a window or chunk, `sinks` whether there are any."""

    heads: int = 4
    key_heads: int = 2
    size: int = 8
    value_size: int = 8
    kind: str = "causal"
    local: int = 3
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None


def packed_rows(lengths, *, share=True) -> PackedRows:
    return pack_rows(*rows_of(lengths).values(), share_prompts=share).rows


def local_mask(sizes: Sizes) -> LocalMask | None:
    if sizes.kind == "causal":
        return None
    if sizes.kind == "window":
        return LocalMask(sliding_window_causal_mask_function(sizes.local), sizes.local)
    no_padding = torch.zeros(1, dtype=torch.int64)
    return LocalMask(chunked_causal_mask_function(sizes.local, no_padding), sizes.local)


def sees(sizes: Sizes, query: int, key: int) -> bool:
    """Whether the token in column `query` of a row attends to the one in column `key`."""
    if key > query or (sizes.kind == "window" and query - key >= sizes.local):
        return False
    return sizes.kind != "chunk" or key // sizes.local == query // sizes.local


def inputs(sizes: Sizes, tokens: int, dtype=torch.float64):
    """Return queries, keys and values [1, heads, N, D] and sinks [heads] or None."""
    random = torch.Generator().manual_seed(5)

    def numbers(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    found = [
        numbers(1, sizes.heads, tokens, sizes.size),
        numbers(1, sizes.key_heads, tokens, sizes.size),
        numbers(1, sizes.key_heads, tokens, sizes.value_size),
        numbers(sizes.heads) if sizes.sinks else None,
    ]
    return [x if x is None else x.requires_grad_() for x in found]


def naive(rows: PackedRows, sizes: Sizes, q, k, v, sinks):
    """Attend one token and one head at a time: [N, heads, value size]."""
    out = {}
    scaling = sizes.size**-0.5 if sizes.scaling is None else sizes.scaling
    for row, length in enumerate(rows.length.tolist()):
        tokens = rows.token_index[row, :length].tolist()
        for column, token in enumerate(tokens):
            if token in out:  # a prompt token of an earlier row
                continue
            seen = [t for c, t in enumerate(tokens) if sees(sizes, column, c)]
            heads = []
            for head in range(sizes.heads):
                group = head // (sizes.heads // sizes.key_heads)
                scores = k[0, group, seen] @ q[0, head, token] * scaling
                if sizes.softcap is not None:
                    scores = sizes.softcap * torch.tanh(scores / sizes.softcap)
                total = scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp())
                heads.append(scores.exp() @ v[0, group, seen] / total)
            out[token] = torch.stack(heads)
    return torch.stack([out[token] for token in range(len(out))])


def computed(kernel: Kernel, rows: PackedRows, sizes: Sizes, q, k, v, sinks, *, split=True):
    """Attend by a kernel: [N, heads, value size]."""
    out, _ = packed_attention(
        nn.Module(), q, k, v, local_mask(sizes),
        attention_rows=AttentionRows(rows, CPU, lambda _: kernel, split=split),
        scaling=sizes.scaling, softcap=sizes.softcap, s_aux=sinks,
    )  # fmt: skip
    return out[0]


def assert_same(rows: PackedRows, sizes: Sizes, compute) -> None:
    """Compare outputs and gradients with the naive loop, in float64."""
    results = []
    for function in (compute, naive):
        tensors = inputs(sizes, len(rows.row))
        out = function(rows, sizes, *tensors)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weights).sum().backward()
        results.append([out.detach(), *(x.grad for x in tensors if x is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def compiled_for_cpu():
    """Compile flex attention for a CPU, forward and backward, with operators as kernels.

    Torch refuses the backward pass on a CPU. `_validate_device` must be replaced.
    """
    torch._dynamo.reset()  # each number of heads is compiled again, and their count is limited
    return torch.compile(flex_attention, backend="aot_eager", dynamic=True, fullgraph=True)


def naive_flash(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    """Stand for `torch.nn.attention.varlen.varlen_attn`: the same arguments, one row at a time.

    As in the kernel, the last query of a row is aligned with its last key.
    """
    assert return_aux is seqused_k is block_table is num_splits is None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.ndim == 1
    assert query.ndim == key.ndim == value.ndim == 3
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key)) and len(key) == len(
        value
    )
    before, after = window_size
    assert after == 0
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for row in range(len(cu_seq_q) - 1):
        q = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        k, v = (x[cu_seq_k[row] : cu_seq_k[row + 1]] for x in (key, value))
        assert 0 < len(q) <= max_q and len(q) <= len(k) <= max_k
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        position = torch.arange(len(q))[:, None] + len(k) - len(q)
        column = torch.arange(len(k))[None]
        seen = column <= position
        if before >= 0:
            seen &= column >= position - before
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)
