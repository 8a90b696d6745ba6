"""verl's sequence-length balancing, over ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from quadriga.compat.verl.tensordicts import index_select_tensor_dict
from quadriga.errors import LengthError
from quadriga.parallel.balancing import (
    balance_stats,
    get_seqlen_balanced_partitions,
    token_budget_micro_batches,
)


def karmarkar_karp(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Balanced partitions; the method is ours."""
    return get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)


def greedy_partition(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Balanced partitions; the method is ours."""
    return get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size)


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Cost of sequences of these lengths: linear layers of width 4096, and attention."""
    return 24576 * seqlen_list + seqlen_list**2


def ceildiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """The least multiple of b that is not below a."""
    return ceildiv(a, b) * b


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    inverse = [0] * len(idx_map)
    for place, index in enumerate(idx_map):
        inverse[index] = place
    return inverse


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens of the parts, as they came and as they were shared out."""
    size = len(seqlen_list) // len(partitions)
    came = [sum(seqlen_list[i * size : (i + 1) * size]) for i in range(len(partitions))]
    stats = balance_stats(seqlen_list, partitions)
    return {
        f"{prefix}/min": min(came),
        f"{prefix}/max": max(came),
        f"{prefix}/minmax_diff": max(came) - min(came),
        f"{prefix}/balanced_min": stats.smallest,
        f"{prefix}/balanced_max": stats.largest,
        f"{prefix}/mean": stats.mean,
    }


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[Any], k_partitions: int
) -> list[list[int]]:
    """As above, keeping neighbouring samples of one uid together; equal numbers of groups."""
    groups: list[list[int]] = []
    for index, uid in enumerate(uid_list):
        if index and uid == uid_list[index - 1]:
            groups[-1].append(index)
        else:
            groups.append([index])
    costs = calculate_workload(torch.as_tensor(seqlen_list)).tolist()
    weights = [sum(costs[i] for i in group) for group in groups]
    parts = get_seqlen_balanced_partitions(weights, k_partitions, equal_size=True)
    return [list(chain.from_iterable(groups[g] for g in part)) for part in parts]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """A TensorDict cut into micro-batches of at most `max_token_len` tokens, and their rows.

    Tokens are those of `attention_mask`, or of a jagged `input_ids`. With `dp_group` all ranks make
    the same number. `force_group_size` neighbouring rows stay together.
    """
    lengths = _lengths(batch)
    if len(lengths) % force_group_size:
        raise LengthError(f"{len(lengths)} rows do not divide into groups of {force_group_size}.")
    grouped = lengths.view(-1, force_group_size).sum(-1)
    parts = token_budget_micro_batches(grouped.numpy(), max_token_len, min_num_micro_batch or 1)
    number = len(parts)
    if dp_group is not None and same_micro_num_in_dp and dist.is_initialized():
        agreed = torch.tensor([number])
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        number = int(agreed.item())
    if num_batches_divided_by:
        number = roundup_divisible(number, num_batches_divided_by)
    if number > len(parts):
        parts = token_budget_micro_batches(grouped.numpy(), max_token_len, number)
    if use_dynamic_bsz_balance:
        parts.sort(key=lambda part: calculate_workload(grouped[part]).sum().item(), reverse=True)
    rows = [
        [group * force_group_size + i for group in part for i in range(force_group_size)]
        for part in parts
    ]
    return [index_select_tensor_dict(batch, part) for part in rows], rows


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """A `DataProto` cut into micro-batches by token budget, and their rows."""
    _, rows = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(part) for part in rows], rows


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Rows of joined micro-batches, back in the order of the batch."""
    indices = list(chain.from_iterable(batch_idx_list))
    if len(indices) != len(data):
        raise LengthError(f"The micro-batches name {len(indices)} rows, the data has {len(data)}.")
    if data.is_nested:
        from quadriga.protocol.values import jagged
        from quadriga.protocol.values.row_selection import from_index

        return jagged.take(data, from_index(get_reverse_idx(indices), len(data)))
    return data[torch.tensor(get_reverse_idx(indices))]


def _lengths(batch: Any) -> torch.Tensor:
    ids = batch["input_ids"] if "input_ids" in batch.keys() else None  # noqa: SIM118
    if ids is not None and ids.is_nested:
        offsets: torch.Tensor = ids.offsets()
        return offsets.diff().cpu()
    lengths: torch.Tensor = batch["attention_mask"].sum(-1).cpu()
    return lengths


__all__ = ["get_seqlen_balanced_partitions", "rearrange_micro_batches"]
