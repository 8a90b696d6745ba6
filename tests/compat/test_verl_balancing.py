"""Balancing of micro-batches over a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from quadriga.compat.verl.tensors import balancing
from quadriga.errors import LengthError


@pytest.mark.parametrize(("backend", "device"), [("nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu")])
def test_ranks_agree_on_a_device_that_their_backend_reduces(monkeypatch, backend, device):
    """NCCL does not reduce tensors of the CPU. The device "meta" stands for an accelerator."""
    reduced = []

    def all_reduce(value, op, group):
        reduced.append(value.device.type)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(balancing, "get_device_name", lambda: "meta")
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: [2, -3, 0])
    lengths = torch.tensor([3, 2, 1])
    parts = balancing._rows_of_micro_batches(lengths, 6, object(), 1, 1, False)
    assert reduced == [device]
    assert sorted(row for part in parts for row in part) == [0, 1, 2]


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


def test_ranks_make_the_largest_number_of_micro_batches(beside):
    beside(3, 4, 0)
    assert len(rows_of(3, 2, 1)) == 3


def test_all_ranks_raise_if_one_cannot_split_its_rows(beside):
    beside(2, 4, 0)
    with pytest.raises(LengthError, match="Sequence 1 has 7 tokens"):  # after the reduction
        rows_of(1, 7)
    beside(0, 4, 1)
    with pytest.raises(LengthError, match="another data-parallel rank cannot split"):
        rows_of(3, 2, 1)


def test_all_ranks_raise_if_one_has_too_few_rows(beside):
    beside(1, 2, 0)
    with pytest.raises(LengthError, match=r"3 micro-batches are needed.*only 2 rows"):
        rows_of(6, 6, 6)
    beside(1, 9, 0)
    with pytest.raises(LengthError, match=r"4 micro-batches.*num_batches_divided_by=4.*only 3"):
        rows_of(6, 6, 6, divisor=4)


def test_a_rank_that_cannot_split_its_rows_takes_part_in_the_reduction(beside, monkeypatch):
    beside(1, 2, 0)
    reduced = []
    inner = dist.all_reduce

    def all_reduce(value, op, group):
        reduced.append(value.tolist())
        inner(value, op, group)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(LengthError, match="Sequence 0"):
        rows_of(7, 1)
    assert reduced == [[0, -2, 1]]
