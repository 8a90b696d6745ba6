"""Attention by the flash kernel for rows of different lengths (CUDA, 16 bits), in one launch.

The kernel takes any number of queries and keys for each row and aligns their *ends*: with 3 queries
and 5 keys, the first query attends to keys 0 1 2, the last one to all five. So a row whose prompt
was packed with an earlier row has the tokens of its response as queries and those of the whole row
as keys, and neither a mask nor padding is needed.

Shapes: N packed tokens, M keys of all rows, b rows with queries, H heads, Hk key heads, D head
size, Dv size of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from quadriga.engines.attention.gather import gather_tokens
from quadriga.parallel.attention_blocks import PackedRows, QueryColumns

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


@dataclass(frozen=True)
class RowLengths:
    """The queries and the keys of each row.

    Attributes:
        query_ends: [b + 1] int32, the packed index behind the last query of each row, after a 0.
        key_ends: [b + 1] int32, the same for the keys.
        most_queries, most_keys: at least as many as any row has.
        keys: [M] int64, the packed index of each key. None: the keys are the queries.
    """

    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    keys: Tensor | None

    @staticmethod
    def of(rows: PackedRows, device: torch.device, queries_of: range | None = None) -> RowLengths:
        """Return the lengths of `rows`, with tensors on `device`.

        `queries_of`: the packed tokens that are queries; None: all.
        """
        columns = QueryColumns.of(rows, queries_of or range(len(rows.row)))
        queries, length = columns.end - columns.first, columns.end
        tokens = rows.token_index[columns.rows]
        keys = None
        # Each row has as many keys as queries or more. If the sums are equal, all are equal.
        if int(length.sum()) > len(rows.row) or queries_of is not None:
            keys = tokens[torch.arange(tokens.shape[1]) < length[:, None]].to(device)
        return RowLengths(
            query_ends=_ends(queries).to(device),
            key_ends=_ends(length).to(device),
            # With at most one query in each row, kernels for generation would be chosen.
            most_queries=max(int(queries.max()), 2),
            most_keys=max(int(length.max()), 2),
            keys=keys,
        )


def attend_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: RowLengths,
    *,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """Attend within rows: [N, H, D], [N, Hk, D], [N, Hk, Dv] -> [N, H, Dv].

    Args:
        window: the number of keys that a query attends to at most; None: all up to its own.
    """
    if rows.keys is not None:
        k, v = gather_tokens(k, rows.keys), gather_tokens(v, rows.keys)
    size, value_size = q.shape[-1], v.shape[-1]
    width = -(-max(size, value_size) // SIZE_UNIT) * SIZE_UNIT
    # Elements that are 0 in queries and keys add 0 to a score, and those of values are cut off.
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    before = -1 if window is None or window >= rows.most_keys else window - 1
    out = varlen_attn(
        q, k, v, rows.query_ends, rows.key_ends, rows.most_queries, rows.most_keys,
        scale=size**-0.5 if scaling is None else scaling,
        window_size=(before, 0),  # keys before the query's own, and after it; −1: any number
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)  # a pair if auxiliary outputs are requested
    return out[..., :value_size]


def _ends(lengths: Tensor) -> Tensor:
    """Return the cumulative sums [b + 1] int32 of `lengths` [b], from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
