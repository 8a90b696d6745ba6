"""verl's sequence-length balancing, computed by `quadriga.parallel.balancing`."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from quadriga.compat.verl.tensordicts import select_rows
from quadriga.errors import LengthError
from quadriga.parallel.balancing import get_seqlen_balanced_partitions, token_budget_micro_batches
from quadriga.parallel.device import get_device_name
from quadriga.protocol import DataProto, fields
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.tensordicts import TensorDict
from quadriga.protocol.values import from_index, jagged_parts, take_jagged

UidT = TypeVar("UidT")


# verl has two methods, and a name for each. Quadriga has one.
karmarkar_karp = greedy_partition = get_seqlen_balanced_partitions


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Estimate the relative cost of sequences of these lengths, as verl does.

    Linear layers cost 24576 per token at hidden size 4096, attention costs one per pair of tokens.
    """
    return 24576 * seqlen_list + seqlen_list**2


def ceildiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(a // -b)


def roundup_divisible(a: int, b: int) -> int:
    """Return the smallest multiple of b that is at least a."""
    return ceildiv(a, b) * b


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    # idx_map = [2, 0, 1] moves row 2 to position 0, row 0 to 1 and row 1 to 2.
    # Its inverse [1, 2, 0] says where row 0, 1 and 2 are now.
    return cast(list[int], torch.tensor(idx_map).argsort().tolist())


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Return metrics of the tokens per partition, before and after balancing.

    "Before" means contiguous partitions of equal numbers of sequences.
    """
    size = len(seqlen_list) // len(partitions)
    before = [sum(seqlen_list[i * size : (i + 1) * size]) for i in range(len(partitions))]
    after = [sum(seqlen_list[i] for i in partition) for partition in partitions]
    low, high = min(before), max(before)
    found = {"min": low, "max": high, "minmax_diff": high - low, "mean": sum(after) / len(after)}
    found |= {"balanced_min": min(after), "balanced_max": max(after)}
    return {f"{prefix}/{name}": value for name, value in found.items()}


def get_group_balanced_partitions(
    seqlen_list: Sequence[int], uid_list: Sequence[UidT], k_partitions: int
) -> list[list[int]]:
    """Balance whole prompt groups: adjacent samples with equal uids stay in one partition.

    Each partition gets the same number of prompt groups.
    """
    # uids a a b b: groups [0, 1] and [2, 3]. Costs are added per group, and groups are balanced.
    groups: list[list[int]] = []
    for index, uid in enumerate(uid_list):
        if index and uid == uid_list[index - 1]:
            groups[-1].append(index)
        else:
            groups.append([index])
    costs = calculate_workload(torch.as_tensor(seqlen_list)).tolist()
    weights = [sum(costs[i] for i in group) for group in groups]
    partitions = get_seqlen_balanced_partitions(weights, k_partitions, equal_size=True)
    return [list(chain.from_iterable(groups[g] for g in chosen)) for chosen in partitions]


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Split a batch into micro-batches of at most `max_token_len` tokens each.

    Return the micro-batches and, for each, the numbers of its rows. The length of a row is the sum
    of its `attention_mask`, or the length of its row of a jagged `input_ids`.

    Args:
        dp_group: all ranks of this process group make the same number of micro-batches.
        num_batches_divided_by: make a multiple of this number of micro-batches.
        same_micro_num_in_dp: False: ignore `dp_group`.
        min_num_micro_batch: make at least this many.
        use_dynamic_bsz_balance: order the micro-batches by workload, largest first.
        force_group_size: this many adjacent rows stay together.

    Raises:
        LengthError: a row (or group of rows) exceeds `max_token_len`, or the rows do not divide.
    """
    group = dp_group if same_micro_num_in_dp else None
    counts = (num_batches_divided_by or 1, min_num_micro_batch or 1, use_dynamic_bsz_balance)
    rows = _rows_of_micro_batches(_lengths(batch), max_token_len, group, *counts, force_group_size)
    return [select_rows(batch, torch.tensor(chosen)) for chosen in rows], rows


def prepare_dynamic_batch(
    data: DataProto,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], list[list[int]]]:
    """Split a `DataProto` as `rearrange_micro_batches` splits a TensorDict."""
    group = dp_group if same_micro_num_in_dp else None
    counts = (num_batches_divided_by or 1, min_num_micro_batch or 1, use_dynamic_bsz_balance)
    rows = _rows_of_micro_batches(_lengths(data.batch), max_token_len, group, *counts)
    return [data.select_idxs(chosen) for chosen in rows], rows


def _collective_device(group: dist.ProcessGroup) -> str:
    """Return the type of device whose tensors a group reduces: NCCL does not reduce CPU tensors."""
    return "cpu" if "gloo" in dist.get_backend(group) else get_device_name()


def _agreed(
    group: dist.ProcessGroup, number: int, rows: int, failure: LengthError | None, max_tokens: int
) -> tuple[int, int]:
    """Return the largest number of micro-batches and the smallest number of rows of all ranks.

    Raises:
        LengthError: another rank cannot split its rows.
    """
    values = torch.tensor([number, -rows, failure is not None], device=_collective_device(group))
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    most, fewest, failed = values.tolist()
    if failed and failure is None:
        raise LengthError(
            f"another data-parallel rank cannot split its rows into micro-batches of {max_tokens} "
            "tokens; its own error names the row"
        )
    return most, -fewest


def _rows_of_micro_batches(
    lengths: torch.Tensor,
    max_tokens: int,
    dp_group: dist.ProcessGroup | None,
    divisor: int,
    least: int,
    by_workload: bool,
    group_size: int = 1,
) -> list[list[int]]:
    """For each micro-batch the numbers of its rows. `lengths` [N]: tokens of each row."""
    if len(lengths) % group_size:
        raise LengthError(
            f"The batch has {len(lengths)} rows, which do not divide into groups of "
            f"force_group_size={group_size}."
        )
    grouped = lengths.view(-1, group_size).sum(-1)
    failure: LengthError | None = None
    parts: list[list[int]] = []
    try:
        parts = token_budget_micro_batches(grouped.numpy(), max_tokens, least)
    except LengthError as error:
        failure = error
    number, fewest = len(parts), len(grouped)
    if dp_group is not None and dist.is_initialized():
        # Every rank must run the same number of backward passes, because each one communicates. A
        # rank that cannot split its rows raises after this call: the others would wait for it.
        number, fewest = _agreed(dp_group, number, fewest, failure, max_tokens)
    if failure is not None:
        raise failure
    number = roundup_divisible(number, divisor)
    if number > fewest:
        raise LengthError(
            f"{number} micro-batches are needed, a multiple of num_batches_divided_by={divisor}, "
            f"but a rank has only {fewest} rows or groups of rows. Use larger batches, or a larger "
            "max_token_len."
        )
    if number > len(parts):
        parts = token_budget_micro_batches(grouped.numpy(), max_tokens, number)
    if by_workload:
        parts.sort(key=lambda part: float(calculate_workload(grouped[part]).sum()), reverse=True)
    # With group_size=2, groups [2, 0] are the rows [4, 5, 0, 1].
    return [[group * group_size + i for group in part for i in range(group_size)] for part in parts]


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Return the rows of concatenated micro-batches in the order of the original batch."""
    indices = list(chain.from_iterable(batch_idx_list))
    if len(indices) != len(data):
        raise LengthError(
            f"batch_idx_list names {len(indices)} rows, but the data has {len(data)} rows."
        )
    if data.is_nested:
        return take_jagged(data, from_index(get_reverse_idx(indices), len(data)))
    return data[torch.tensor(get_reverse_idx(indices))]


def _lengths(batch: TensorDict | RemoteBatch) -> torch.Tensor:
    """Tokens of each row, [N] on the CPU."""
    ids = batch[fields.INPUT_IDS] if fields.INPUT_IDS in batch.keys() else None  # noqa: SIM118
    if isinstance(ids, torch.Tensor) and ids.is_nested:
        _, offsets = jagged_parts(ids)
        return offsets.diff().cpu()
    return cast(torch.Tensor, batch[fields.ATTENTION_MASK].bool().sum(-1).cpu())


__all__ = ["get_seqlen_balanced_partitions", "rearrange_micro_batches"]
