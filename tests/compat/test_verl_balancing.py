"""Balancing of micro-batches over a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from quadriga.compat.verl.tensors import balancing


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
    monkeypatch.setattr(torch.Tensor, "item", lambda self: 2)
    lengths = torch.tensor([3, 2, 1])
    parts = balancing._rows_of_micro_batches(lengths, 6, object(), 1, 1, False)
    assert reduced == [device]
    assert sorted(row for part in parts for row in part) == [0, 1, 2]
