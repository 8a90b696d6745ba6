"""Groups: the samples that answer one prompt. Shapes: B samples, G groups.

A sample without a single response token (a padding row, a sample masked on purpose) is not a
member of its group: it neither counts nor shifts a mean. Group statistics run in float64, so that
equal rewards differ from their mean by nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quadriga.errors import GroupError, ShapeError

GroupIds = Sequence[Any] | np.ndarray | Tensor


@dataclass(frozen=True)
class Groups:
    """Which sample belongs to which group.

    Attributes:
        index_B: int64, group number of each sample, 0 … G-1 in order of first appearance.
        member_B: bool, False for samples that take no part in statistics.
        num_groups: G.
    """

    index_B: Tensor
    member_B: Tensor
    num_groups: int

    def sum_G(self, values_B: Tensor) -> Tensor:
        """Σ over the members of each group, float64 [G]."""
        zeros = torch.zeros(self.num_groups, dtype=torch.float64, device=values_B.device)
        kept = values_B.double().masked_fill(~self.member_B, 0.0)
        return zeros.index_add_(0, self.index_B, kept)

    def count_G(self) -> Tensor:
        """Members of each group, float64 [G]."""
        return self.sum_G(torch.ones_like(self.member_B, dtype=torch.float64))

    def extreme_G(self, values_B: Tensor, largest: bool) -> Tensor:
        """Largest or smallest value among the members, float64 [G]; ∓inf where there are none."""
        empty = -torch.inf if largest else torch.inf
        kept = values_B.double().masked_fill(~self.member_B, empty)
        start = torch.full((self.num_groups,), empty, dtype=torch.float64, device=kept.device)
        return start.scatter_reduce_(0, self.index_B, kept, "amax" if largest else "amin")

    def mean_G(self, values_B: Tensor) -> Tensor:
        """Mean over members, float64 [G]; 0 where there are none."""
        return self.sum_G(values_B) / self.count_G().clamp(min=1)

    def centre_B(self, values_B: Tensor) -> Tensor:
        """Value minus its group's mean, float64 [B]; exactly 0 in groups of equal values."""
        centred = values_B.double() - self.mean_G(values_B)[self.index_B]
        return centred.masked_fill(~(self.signal_G(values_B)[self.index_B] & self.member_B), 0.0)

    def std_G(self, values_B: Tensor) -> Tensor:
        """Sample standard deviation (n − 1) over members, float64 [G]; 0 below two members."""
        squares = self.sum_G(self.centre_B(values_B).square())
        return (squares / (self.count_G() - 1).clamp(min=1)).sqrt()

    def signal_G(self, values_B: Tensor) -> Tensor:
        """bool [G]: True where at least two members differ. The others teach nothing."""
        return self.extreme_G(values_B, largest=True) > self.extreme_G(values_B, largest=False)


def has_tokens(mask_BT: Tensor) -> Tensor:
    """bool [B]: samples with at least one token (`mask.any(-1)`, several times faster)."""
    if mask_BT.shape[1] == 0:
        return mask_BT.any(-1)
    return mask_BT.view(torch.uint8).amax(-1).bool()


def make_groups(group_ids: GroupIds, member_B: Tensor) -> Groups:
    """Number the groups that `group_ids` name.

    Args:
        group_ids: B hashable ids (prompt uids: strings, numbers) or an integer tensor [B].
        member_B: bool [B].

    Raises:
        ShapeError: another number of ids than samples. GroupError: an id that is None or NaN.
    """
    if isinstance(group_ids, Tensor):
        group_ids = group_ids.detach().cpu().numpy()
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else list(group_ids)
    if len(ids) != member_B.shape[0]:
        raise ShapeError(
            f"`group_ids` names {len(ids)} samples, but the batch holds {member_B.shape[0]}.",
            tensor="group_ids",
            expected=member_B.shape[0],
            got=len(ids),
        )
    numbers: dict[Any, int] = {}
    index = [numbers.setdefault(name, len(numbers)) for name in ids]
    if None in numbers or any(name != name for name in numbers):
        row = next(i for i, name in enumerate(ids) if name is None or name != name)
        raise GroupError(
            f"`group_ids` is {ids[row]} at row {row}: every sample needs the id of its prompt.",
            tensor="group_ids",
            row=row,
        )
    return Groups(torch.tensor(index, device=member_B.device), member_B, len(numbers))


def require_group_size(groups: Groups, least: int, estimator: str) -> None:
    """Raise `GroupError` unless every group with members has at least `least` of them."""
    counts = groups.count_G()
    short = (counts > 0) & (counts < least)
    if bool(short.any()):
        group = int(short.nonzero()[0])
        row = int((groups.index_B == group).nonzero()[0])
        raise GroupError(
            f"`{estimator}` compares at least {least} samples of one prompt, but the group of row "
            f"{row} has {int(counts[group])}; sample more responses a prompt (rollout.n).",
            tensor="group_ids",
            row=row,
            group=group,
        )
