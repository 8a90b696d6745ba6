"""Batches made the same way for several test files."""

from __future__ import annotations

import itertools

from quadriga.protocol import DataProto, Origin
from quadriga.protocol.shipping import pack_result, unpack_result


def shard(data: DataProto, ranks: int, method: str = "make") -> DataProto:
    """The same batch as the joined results of `ranks` ranks, near-equal parts."""
    n = len(data)
    cuts = [n * r // ranks for r in range(ranks + 1)]
    replies = [
        unpack_result(pack_result(data[a:b], Origin("actor", r, method, "10.0.0.1")))
        for r, (a, b) in enumerate(itertools.pairwise(cuts))
    ]
    return DataProto.concat(replies)
