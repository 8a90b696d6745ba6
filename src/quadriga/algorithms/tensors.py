"""Tensors of samples and tokens: checks at the border, statistics under a mask, prompt groups, and
discounted sums. Shapes: B samples, T tokens, G groups.

A check costs one reduction over the tensor. Only if that reduction shows a fault is the tensor
searched for the row to report. Positions outside the mask may hold any value, NaN included.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quadriga.errors import GroupError, MaskError, NonFiniteError, ShapeError


def require_same_shape(name: str, like: Tensor, **tensors: Tensor) -> None:
    """Raise `ShapeError` unless every tensor in `tensors` has the shape of `like`.

    Args:
        name: the name of `like` in the error message.
        tensors: the tensors to check, by the name to report.
    """
    for other, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ShapeError(
                f"`{other}` has shape {list(tensor.shape)}, but `{name}` has {list(like.shape)}; "
                f"both must describe the same samples and tokens.",
                tensor=other,
                expected=tuple(like.shape),
                got=tuple(tensor.shape),
            )


def to_bool_mask(mask: Tensor, name: str = "response_mask") -> Tensor:
    """Return the mask as bool. A bool mask is returned as it is, not copied.

    Args:
        mask: bool, integer or floating, any shape.
        name: the name to report.

    Raises:
        MaskError: a value is neither 0 nor 1. The message names the first such row.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.numel() == 0:
        return mask.to(torch.bool)
    if mask.is_floating_point():
        result = mask != 0
        valid = bool((mask == result).all())
    else:
        low, high = torch.aminmax(mask)
        result, valid = mask.bool(), int(low) >= 0 and int(high) <= 1
    if not valid:
        wrong = (mask != result.to(mask.dtype)).reshape(mask.shape[0], -1)
        row = int(wrong.any(-1).nonzero()[0])
        value = mask.reshape(mask.shape[0], -1)[row][wrong[row]][0].item()
        raise MaskError(
            f"`{name}` must hold only 0 and 1, but row {row} holds {value}.",
            tensor=name,
            row=row,
            value=value,
        )
    return result


def require_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise `NonFiniteError` if a value under the mask is NaN or infinite.

    Args:
        mask: bool, the shape of each tensor; None checks every position.
        tensors: the tensors to check, by the name to report.
    """
    for name, tensor in tensors.items():
        values = tensor.detach()
        if mask is not None:
            values = values.masked_fill(~mask, 0)
        # A sum that contains NaN or infinity is NaN or infinite, so one reduction finds both.
        if bool(torch.isfinite(values.sum())):
            continue
        bad = ~torch.isfinite(values)
        if not bool(bad.any()):
            # All values are finite and only their sum overflowed: 4 × 3e38 is inf in float32.
            continue
        where = [int(i) for i in bad.nonzero()[0]]
        raise NonFiniteError(
            f"`{name}` is {values[tuple(where)].item()} at row {where[0]}"
            + (f", token {where[1]}" if len(where) > 1 else "")
            + f" ({int(bad.sum())} such values in all). Find the computation that produced it, or "
            f"set that sample's mask to 0.",
            tensor=name,
            row=where[0],
            position=tuple(where),
        )


def checked_mask(
    mask_BT: Tensor, validate: bool = True, name: str = "response_mask", /, **tensors: Tensor
) -> Tensor:
    """Return the mask as bool, after checks of the mask and of the tensors that it selects from.

    Args:
        mask_BT: 0/1.
        validate: check the selected values for NaN and infinity.
        name: the name of the mask to report.
        tensors: the tensors, by the name to report.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    if mask_BT.dim() != 2:
        raise ShapeError(
            f"`{name}` must have shape [samples, tokens], but has shape {list(mask_BT.shape)}.",
            tensor=name,
            got=tuple(mask_BT.shape),
        )
    require_same_shape(name, mask_BT, **tensors)
    mask = to_bool_mask(mask_BT, name)
    if validate:
        require_finite(mask, **tensors)
    return mask


def as_float(tensor: Tensor) -> Tensor:
    """Return `tensor` in at least float32: float64 stays, every other dtype becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


# Statistics over the tokens that a mask selects. Shapes: any; the mask has the values' shape.
#
# Values outside the mask are replaced, not multiplied by 0, so NaN there has no effect.

WHITEN_EPSILON = 1e-8
# Numpy asks the kernel for huge pages from this size on, torch does not. With pages of 4 kB, the
# page faults of a new tensor take longer than the arithmetic on it.
_HUGE_BYTES = 4 * 2**20
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def new_empty(shape: torch.Size, like: Tensor) -> Tensor:
    """Return an uninitialised tensor with the dtype and device of `like`.

    Large tensors on the CPU are allocated by numpy (see `_HUGE_BYTES`).
    """
    on_cpu = like.device.type == "cpu" and like.dtype in _NUMPY
    if not on_cpu or shape.numel() * like.element_size() < _HUGE_BYTES:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, dtype=_NUMPY[like.dtype]))


def masked_copy(values: Tensor, selected: Tensor) -> Tensor:
    """Return a detached copy of `values` with 0 outside the bool mask.

    Args:
        values: the shape of the mask, or one that broadcasts to it ([B, 1]).
        selected: bool.
    """
    data = values.detach()
    shape = data.expand(selected.shape).shape
    return torch.where(selected, data, data.new_zeros(()), out=new_empty(shape, data))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ values·mask over `dim` (None: over all positions), in the dtype of `values`."""
    kept = values.masked_fill(~to_bool_mask(mask), 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ values·mask / Σ mask over `dim`; 0 where the mask selects nothing."""
    selected = to_bool_mask(mask)
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the selected values, 0-d; 0 if fewer than two are selected.

    Args:
        unbiased: divide by n − 1 instead of n.
    """
    return _centre(as_float(values), to_bool_mask(mask), unbiased)[2]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return (values − mean) / √(var + 1e-8) over the selected values, 0 elsewhere.

    If all selected values are equal, the result is exactly 0 (with `shift_mean=False`: exactly
    the values).

    Args:
        values: any dtype; the result is float32 or float64.
        mask: 0/1.
        shift_mean: False adds the mean again after scaling.
    """
    return whiten_selected(as_float(values), to_bool_mask(mask), shift_mean)


def whiten_selected(
    values: Tensor, selected: Tensor, shift_mean: bool = True, out: Tensor | None = None
) -> Tensor:
    """Compute `masked_whiten` for float values and a bool mask.

    Args:
        out: the tensor to write to; it may be `values`. None allocates one.
    """
    mean, centred, var = _centre(values, selected, unbiased=True, out=out)
    whitened = centred.mul_(torch.rsqrt(var + WHITEN_EPSILON))
    return whitened if shift_mean else whitened.add_(selected * mean)


# Mean and variance are computed from the differences to one of the selected values. Example in
# float32, where the sum of these values, 30000003, is not representable:
#
#     values     10000000   10000001   10000002
#     some       10000000                          the first selected value
#     offset     0          1          2
#     gap        1                                 the mean of the offsets; the mean is some + gap
#     centred    −1         0          1
#
# A large common part therefore costs no precision. If all values are equal, `offset`, `centred`
# and the variance are exactly 0.
def _centre(
    values: Tensor, selected: Tensor, unbiased: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, values − mean with 0 outside the mask, variance); the first and last 0-d."""
    count = int(torch.count_nonzero(selected))
    if count == 0:
        zero = values.new_zeros(())
        return zero, torch.zeros_like(values) if out is None else out.zero_(), zero
    # Find one selected position: the first row that has one, then the first column in that row.
    # `amax` and `argmax` run on bytes, because on bool tensors they are many times slower.
    width = max(selected.shape[-1], 1) if selected.dim() else 1
    flags = selected.view(torch.uint8).reshape(-1, width)
    row = int(flags.amax(-1).argmax())
    some = values.reshape(flags.shape)[row, int(flags[row].argmax())].clone()
    if out is None and not values.requires_grad:
        out = new_empty(values.shape, values)
    # `some` and `gap` stand outside the mask, where the subtraction then gives exactly 0.
    offset = torch.where(selected, values, some, out=out).sub_(some)
    gap = offset.sum() / count
    centred = torch.where(selected, offset, gap, out=offset).sub_(gap)
    degrees = max(count - 1, 1) if unbiased else count
    return some + gap, centred, torch.linalg.vector_norm(centred).square() / degrees


# Prompt groups: the samples of one prompt. Shapes: B samples, G groups.
#
# A sample without a single generated token (a padding row, or a sample whose mask was set to 0) is
# not a member of its group: no count and no mean includes it. Statistics are computed in float64,
# so that the difference of equal rewards and their mean is 0.

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


# Discounted sums backwards in time without a loop over tokens. Shapes: B samples, T tokens.
#
# The recurrence x_t = d_t + c·x_{t+1} is a product of the row d with a triangular matrix of powers
# of c. The product is computed for all blocks of K tokens at once. The values at the starts of the
# blocks then follow the same recurrence with c^K, and each block adds what comes from its right.

_BLOCK = 32


# c = 0.5, d = 1 2 3 4, blocks of K = 2:
#
#     direct:                x_4 = 4,  x_3 = 3 + 2 = 5,  x_2 = 2 + 2.5 = 4.5,  x_1 = 1 + 2.25 = 3.25
#
#     sums within blocks:    [1 + 1, 2]  [3 + 2, 4]            =  [2, 2]  [5, 4]
#     first values:          2, 5 with decay c² = 0.25:          2 + 1.25 = 3.25,  5
#     add to the left block: 5 · [c², c] = [1.25, 2.5]         =  [3.25, 4.5]  [5, 4]
def reverse_discounted_sum(terms_BT: Tensor, decay: float) -> Tensor:
    """Return x_t = Σ_{s≥t} decay^(s−t) · terms_s for each row; same shape and dtype."""
    count, width = terms_BT.shape
    powers = _powers(_BLOCK, decay, terms_BT)
    if width == 0:
        return terms_BT.clone()
    if width <= _BLOCK:
        return terms_BT @ powers[:width, :width]
    spare = -width % _BLOCK
    padded = torch.nn.functional.pad(terms_BT, (0, spare)) if spare else terms_BT
    tiles = padded.reshape(-1, _BLOCK)
    blocks = torch.mm(tiles, powers, out=new_empty(tiles.shape, tiles)).view(count, -1, _BLOCK)
    first = reverse_discounted_sum(blocks[:, :, 0], decay**_BLOCK)
    # The first value of the next block reaches position i of this block with decay^(K − i). The
    # last row of `powers` holds decay^(K − 1 − i).
    blocks[:, :-1].addcmul_(first[:, 1:, None], decay * powers[-1])
    return blocks.view(count, -1)[:, :width]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """Return the matrix [size, size] with decay^(s−t) at row s, column t ≤ s, and 0 elsewhere."""
    # size = 3, decay = c:      1    0   0
    #                           c    1   0
    #                           c²   c   1
    steps = torch.arange(size, device=like.device)
    gap = steps[:, None] - steps[None, :]
    column = torch.tensor([decay**k for k in range(size)], dtype=like.dtype, device=like.device)
    return column[gap.clamp(min=0)].masked_fill(gap < 0, 0)


def is_left_aligned(mask_BT: Tensor) -> bool:
    """Return whether every row of the bool mask is ones followed by zeros."""
    if mask_BT.shape[1] < 2 or mask_BT.shape[0] == 0:
        return True
    # A 0 followed by a 1 is left padding or a gap. The maximum runs on bytes, which is faster
    # than `any` on bool.
    rises = mask_BT[:, 1:] > mask_BT[:, :-1]
    return not bool(rises.view(torch.uint8).max())


# Two rows, * outside the mask:
#
#     mask       1 0 0 1      tensor     a * * b      packed     a b      new mask     1 1
#                0 1 1 1                 * c d e                 c d e                 1 1 1
#
# The packed width is 3, the length of the longest row; the packed row "a b" ends with a 0.
def pack_left(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Move the values under the mask to the front of each row, in their order.

    Tokens that are adjacent in time are then adjacent in memory. An observation between two turns
    is not a time step: it has no value and no action of the policy.

    Returns:
        (new mask, moved tensors …), all [B, length of the longest row].
    """
    lengths_B = mask_BT.sum(-1)
    width = int(lengths_B.max()) if lengths_B.numel() else 0
    front = torch.arange(width, device=mask_BT.device)[None, :] < lengths_B[:, None]
    # `masked_select` and `masked_scatter_` both run in row-major order, so the k-th selected value
    # of a row lands at position k of the same row.
    moved = [
        tensor.new_zeros(front.shape).masked_scatter_(front, tensor.masked_select(mask_BT))
        for tensor in tensors
    ]
    return front, *moved


def unpack_left(packed_BS: Tensor, front_BS: Tensor, mask_BT: Tensor) -> Tensor:
    """Undo `pack_left` for one tensor.

    Args:
        packed_BS: a packed tensor, S the length of the longest row.
        front_BS: the new mask that `pack_left` returned.
        mask_BT: the mask that was passed to `pack_left`.

    Returns:
        [B, T], 0 outside the mask.
    """
    empty = packed_BS.new_zeros(mask_BT.shape)
    return empty.masked_scatter_(mask_BT, packed_BS.masked_select(front_BS))
