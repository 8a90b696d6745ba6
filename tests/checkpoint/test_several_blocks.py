"""A rank that has several blocks of one tensor."""

from __future__ import annotations

import pytest
import torch

from quadriga.checkpoint.shards import Block, Origin, read_blocks, write_shard
from quadriga.errors import CheckpointError

WHOLE = torch.arange(12.0).view(4, 3)


def rows(*numbers: int, name: str = "w") -> dict[str, Block]:
    return {
        f"{name}#{i}": Block(WHOLE[n : n + 1].clone(), (4, 3), (n, 0), True)
        for i, n in enumerate(numbers)
    }


def test_blocks_are_read_by_any_division_of_the_tensor(tmp_path):
    write_shard(tmp_path, rows(0, 2), {}, Origin(1, 0, 2))
    write_shard(tmp_path, rows(1, 3), {}, Origin(1, 1, 2))
    found = torch.zeros(4, 3)
    read_blocks(tmp_path, {"w": found}, rank=0)
    assert torch.equal(found, WHOLE)
    part = Block(torch.zeros(2, 3), (4, 3), (1, 0), False)
    read_blocks(tmp_path, {"w#7": part}, rank=0)
    assert torch.equal(part.data, WHOLE[1:3])


def test_a_missing_block_is_named(tmp_path):
    write_shard(tmp_path, rows(0, 2, 3), {}, Origin(1, 0, 1))
    with pytest.raises(CheckpointError, match="holds 9 of the 12 elements of 'w'"):
        read_blocks(tmp_path, {"w": torch.zeros(4, 3)}, rank=0)
