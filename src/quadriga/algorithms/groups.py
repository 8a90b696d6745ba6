"""Prompt groups: the samples of one prompt. Shapes: B samples, G groups.

A sample without a single generated token (a padding row, or a sample whose mask was set to 0) is
not a member of its group: no count and no mean includes it. Statistics are computed in float64,
so that the difference of equal rewards and their mean is 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quadriga.errors import GroupError, ShapeError

GroupIds = Sequence[Hashable] | NDArray[np.generic] | Tensor


# Six samples of three prompts; row 3 has no generated token:
#
#     row        0     1     2     3     4     5
#     id         "x"   "y"   "x"   "y"   "z"   "x"
#     index_B    0     1     0     1     2     0         G = 3
#     member_B   T     T     T     F     T     T
#     reward     1     5     4     9     2     1
#
#     count_G    3  1  1
#     mean_G     2  5  2
#     nonzero_variance_G
#                T  F  F       only prompt group "x" has different rewards
#     centre_B   −1  0  2  0  0  −1
#     std_G      √3  0  0      √((1 + 4 + 1) / 2)
@dataclass(frozen=True)
class Groups:
    """The prompt group of each sample, and statistics over prompt groups.

    Attributes:
        index_B: int64; the group number of each sample, 0 … G−1 in order of first appearance.
        member_B: bool; False for samples that statistics exclude.
        num_groups: G.
    """

    index_B: Tensor
    member_B: Tensor
    num_groups: int

    def sum_G(self, values_B: Tensor) -> Tensor:
        """Return the sum over the members of each group, float64 [G]."""
        zeros = torch.zeros(self.num_groups, dtype=torch.float64, device=values_B.device)
        kept = values_B.double().masked_fill(~self.member_B, 0.0)
        return zeros.index_add_(0, self.index_B, kept)

    def count_G(self) -> Tensor:
        """Return the number of members of each group, float64 [G]."""
        return self.sum_G(torch.ones_like(self.member_B, dtype=torch.float64))

    def extreme_G(self, values_B: Tensor, largest: bool) -> Tensor:
        """Return the largest or smallest value among the members, float64 [G].

        A group without members gets −inf (largest) or inf (smallest).
        """
        empty = -torch.inf if largest else torch.inf
        kept = values_B.double().masked_fill(~self.member_B, empty)
        start = torch.full((self.num_groups,), empty, dtype=torch.float64, device=kept.device)
        return start.scatter_reduce_(0, self.index_B, kept, "amax" if largest else "amin")

    def mean_G(self, values_B: Tensor) -> Tensor:
        """Return the mean over the members of each group, float64 [G]; 0 without members."""
        return self.sum_G(values_B) / self.count_G().clamp(min=1)

    def centre_B(self, values_B: Tensor) -> Tensor:
        """Return each value minus the mean of its group, float64 [B].

        The result is exactly 0 in groups of equal values. Three rewards of 0.1 have a mean that
        differs from 0.1 by 1e-17, and GRPO would divide that rounding error by 1e-6.
        """
        centred = values_B.double() - self.mean_G(values_B)[self.index_B]
        return centred.masked_fill(
            ~(self.nonzero_variance_G(values_B)[self.index_B] & self.member_B), 0.0
        )

    def std_G(self, values_B: Tensor) -> Tensor:
        """Return the sample standard deviation (n − 1) of each group, float64 [G].

        A group with fewer than two members gets 0.
        """
        squares = self.sum_G(self.centre_B(values_B).square())
        return (squares / (self.count_G() - 1).clamp(min=1)).sqrt()

    def nonzero_variance_G(self, values_B: Tensor) -> Tensor:
        """Return bool [G], True where at least two members have different values."""
        return self.extreme_G(values_B, largest=True) > self.extreme_G(values_B, largest=False)


def has_tokens(mask_BT: Tensor) -> Tensor:
    """Return bool [B], True for samples with at least one token under the bool mask."""
    if mask_BT.shape[1] == 0:
        return mask_BT.any(-1)
    # `amax` over bytes is vectorised on CPU; `mask_BT.any(-1)` is several times slower.
    return mask_BT.view(torch.uint8).amax(-1).bool()


def make_groups(group_ids: GroupIds, member_B: Tensor) -> Groups:
    """Number the groups in order of first appearance.

    Args:
        group_ids: B hashable ids (prompt uids: strings or numbers), or an integer tensor [B].
        member_B: bool [B].

    Raises:
        ShapeError: the number of ids is not B.
        GroupError: an id is None or NaN.
    """
    if isinstance(group_ids, Tensor):
        group_ids = group_ids.detach().cpu().numpy()
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else list(group_ids)
    if len(ids) != member_B.shape[0]:
        raise ShapeError(
            f"`group_ids` has {len(ids)} ids, but the batch has {member_B.shape[0]} samples; "
            f"every sample needs one id.",
            tensor="group_ids",
            expected=member_B.shape[0],
            got=len(ids),
        )
    numbers: dict[Hashable, int] = {}
    # A new id gets the next free number, len(numbers); a known id keeps its number.
    index = [numbers.setdefault(name, len(numbers)) for name in ids]
    # NaN is the only id that differs from itself. Each NaN object would be a group of its own.
    if None in numbers or any(name != name for name in numbers):
        row = next(i for i, name in enumerate(ids) if name is None or name != name)
        raise GroupError(
            f"`group_ids` is {ids[row]} at row {row}: every sample needs the id of its prompt.",
            tensor="group_ids",
            row=row,
        )
    return Groups(torch.tensor(index, device=member_B.device), member_B, len(numbers))


def require_group_size(groups: Groups, least: int, estimator: str) -> None:
    """Raise `GroupError` unless every group that has members has at least `least` of them."""
    counts = groups.count_G()
    short = (counts > 0) & (counts < least)
    if bool(short.any()):
        group = int(short.nonzero()[0])
        row = int((groups.index_B == group).nonzero()[0])
        raise GroupError(
            f"`{estimator}` needs at least {least} samples per prompt, but the prompt group of "
            f"row {row} has {int(counts[group])}. Sample more responses per prompt (rollout.n).",
            tensor="group_ids",
            row=row,
            group=group,
        )
