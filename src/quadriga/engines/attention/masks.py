"""Which tokens of its own row a token attends to, for each kind of attention layer.

Shapes: in a block, b rows, Lq query and Lk key slots.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from quadriga.errors import ModelError
from quadriga.parallel.attention_blocks import AttentionBlock

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

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, *, part: bool) -> AttentionCall:
        """Describe the call with these arguments ([N, H, D] three times)."""
        return AttentionCall(
            dtype=q.dtype,
            heads=q.shape[1],
            key_heads=k.shape[1],
            size=q.shape[-1],
            value_size=v.shape[-1],
            mask="causal" if scoring.mask is None else scoring.mask.kind,
            softcap=scoring.softcap is not None,
            sinks=scoring.sinks is not None,
            part=part,
        )


KernelOf = Callable[[AttentionCall], Kernel]


def sdpa_only(call: AttentionCall) -> Kernel:
    """Compute every call by `sdpa`."""
    return "sdpa"
