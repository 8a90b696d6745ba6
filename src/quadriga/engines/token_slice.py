"""The slice of a packed micro-batch that one rank of a model-parallel group computes.

Example: 11 packed tokens and 2 ranks. One padding token makes 12, so a rank has 6:

    packed index    0  1  2  3  4  5 │ 6  7  8  9 10 ·
    predictors         1  1        5 │    7     9          of the K = 5 targets
    rank 0             1  1        5                        three outputs
    rank 1                              7 − 6  9 − 6        two outputs

The outputs of all ranks are joined, so that each rank has all of them and computes the same loss.

Shapes: N packed tokens, K targets, C outputs of a target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quadriga.parallel.model_ranks import ModelRanks
from quadriga.parallel.packing import PackedBatch
from quadriga.parallel.token_exchange import join_outputs


@dataclass(frozen=True)
class TokenSlice:
    """The tokens and the targets of one rank.

    Attributes:
        input_ids: [1, n] int64, the tokens of this rank.
        position_ids: [1, n · t] int64, of the tokens that t ranks of tensor parallelism have
            together: their attention computes the same tokens.
        predictors: [k] int64, the index in the slice of the token that predicts a target. At least
            one, so that every kernel has an input: without a target, the first token stands in.
        labels: [k] int64, the token ids of the targets.
        counts: the targets of each rank of the group.
        order: [K] int64, the target of each joined output.
        ranks: the group.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    labels: Tensor
    counts: tuple[int, ...]
    order: Tensor
    ranks: ModelRanks

    @staticmethod
    def of(packed: PackedBatch, ranks: ModelRanks) -> TokenSlice:
        """Cut a micro-batch whose tokens divide over the ranks of the group."""
        count, own = ranks.all.size, ranks.all.index
        size = packed.input_ids.shape[1] // count
        assert size * count == packed.input_ids.shape[1], "see in_equal_slices"
        slice_of_target = packed.predictors // size
        order = torch.argsort(slice_of_target, stable=True)
        counts = torch.bincount(slice_of_target, minlength=count).tolist()
        chosen = torch.split(order, counts)[own]
        predictors, labels = packed.predictors[chosen] - own * size, packed.labels[chosen]
        if not len(chosen):
            predictors = labels = torch.zeros(1, dtype=torch.int64, device=order.device)
        wide = size * ranks.tensor.size
        first = own // ranks.tensor.size * wide
        return TokenSlice(
            packed.input_ids[:, own * size : (own + 1) * size],
            packed.position_ids[:, first : first + wide],
            predictors,
            labels,
            tuple(counts),
            order,
            ranks,
        )

    def to(self, device: torch.device) -> TokenSlice:
        """Return the same slice with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            predictors=self.predictors.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            order=self.order.to(device, non_blocking=True),
        )

    def join(self, outputs: Tensor) -> Tensor:
        """Return the outputs of all targets, from those of the own: [k, C] -> [K, C]."""
        own = outputs[: self.counts[self.ranks.all.index]]
        joined = join_outputs(own, self.counts, self.ranks.all)
        return torch.empty_like(joined).index_copy(0, self.order, joined)
