"""Sequence-length balancing in verl's spelling, also of micro-batches over a process group."""

import pytest
import torch
import torch.distributed as dist

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.compat.verl import balancing
from quadriga.errors import LengthError


@pytest.mark.parametrize(("backend", "device"), [("nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_ranks_agree_on_a_device_that_their_backend_reduces(monkeypatch, backend, device):
    """NCCL does not reduce tensors of the CPU. The device "meta" stands for an accelerator."""
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(balancing, "get_device_name", lambda: "meta")
    assert balancing._collective_device(object()) == device


@pytest.fixture
def beside(monkeypatch):
    """beside(number, rows, failed): another rank that takes part in the reductions."""

    def _beside(number, rows, failed):
        other = torch.tensor([number, -rows, failed])
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
        monkeypatch.setattr(
            dist, "all_reduce", lambda value, op, group: value.copy_(torch.maximum(value, other))
        )

    return _beside


def rows_of(*lengths, divisor=1):
    return balancing._rows_of_micro_batches(
        torch.tensor(lengths), 6, object(), divisor, 1, by_workload=False
    )


def test_all_ranks_raise_if_one_cannot_split_its_rows(beside):
    beside(2, 4, 0)
    with pytest.raises(LengthError, match="Sequence 1 has 7 tokens"):  # after the reduction
        rows_of(1, 7)
    beside(0, 4, 1)
    with pytest.raises(LengthError, match="another data-parallel rank cannot split"):
        rows_of(3, 2, 1)


def test_balancing():
    from verl.utils import seqlen_balancing as sb

    lengths = [8, 7, 1, 2, 6, 3, 5, 4]
    parts = sb.karmarkar_karp(lengths, 4, equal_size=True)
    assert [sum(lengths[i] for i in part) for part in parts] == [9, 9, 9, 9]
    assert sb.get_reverse_idx([2, 0, 1]) == [1, 2, 0]
    assert (sb.ceildiv(7, 3), sb.roundup_divisible(7, 3)) == (3, 9)
    balance = sb.log_seqlen_unbalance(lengths, parts, "tokens")
    assert (balance["tokens/minmax_diff"], balance["tokens/balanced_max"]) == (12, 9)
    grouped = sb.get_group_balanced_partitions([1, 1, 5, 5, 2, 2, 4, 4], list("aabbccdd"), 2)
    assert sorted(map(sorted, grouped)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_dynamic_batches():
    from verl.protocol import DataProto
    from verl.utils import seqlen_balancing as sb

    lengths = torch.tensor([4, 1, 3, 2])
    mask = (torch.arange(4)[None] < lengths[:, None]).long()
    data = DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(4)})
    parts, rows = sb.prepare_dynamic_batch(data, max_token_len=5)
    assert all(int(part.batch["attention_mask"].sum()) <= 5 for part in parts)
    joined = torch.cat([part.batch["row"] for part in parts])
    assert sb.restore_dynamic_batch(joined, rows).tolist() == [0, 1, 2, 3]


def test_rows_of_a_group_stay_in_one_micro_batch():
    from verl.utils import seqlen_balancing as sb, tensordict_utils as tu

    lengths = torch.tensor([1, 1, 4, 4, 2, 2])
    mask = (torch.arange(4)[None] < lengths[:, None]).long()
    batch = tu.get_tensordict({"attention_mask": mask, "row": torch.arange(6)})
    parts, rows = sb.rearrange_micro_batches(
        batch, max_token_len=8, num_batches_divided_by=3, force_group_size=2
    )
    assert rows == [[2, 3], [4, 5], [0, 1]]  # largest workload first
    assert [part["row"].tolist() for part in parts] == rows
    with pytest.raises(LengthError, match="6 rows, which do not divide into groups"):
        sb.rearrange_micro_batches(batch, max_token_len=8, force_group_size=4)
