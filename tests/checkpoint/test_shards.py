"""Shards on disk: written by some ranks, read by others; scalars and random states."""

import json
import platform
import random
from itertools import pairwise

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from quadriga.checkpoint.files import digest_file, write_tensors
from quadriga.checkpoint.shards import Block, Origin, RankState, load_rank_state, read_scalars
from quadriga.checkpoint.writer import write_files
from quadriga.errors import CheckpointError

FULL = torch.arange(35.0).view(7, 5)


def rows_block(first, last):
    return Block(FULL[first:last].clone(), (7, 5), (first, 0), True)


def write(folder, cuts):
    for rank, (first, last) in enumerate(pairwise(cuts)):
        blocks = {"w": rows_block(first, last)}
        RankState.of(blocks, {}, Origin(0, rank, len(cuts) - 1)).write(folder)


@pytest.mark.parametrize("cuts", [[0, 7], [0, 4, 7], [0, 3, 6, 7, 7]])
@pytest.mark.parametrize("wanted", [(0, 7), (0, 4), (4, 7), (2, 5), (7, 7)])
def test_blocks_can_be_read_with_any_other_sharding(tmp_path, cuts, wanted):
    write(tmp_path, cuts)
    block = rows_block(*wanted)
    block.data.fill_(-1)
    load_rank_state(tmp_path, {"w": block}, rank=0)
    assert torch.equal(block.data, FULL[slice(*wanted)])


def test_a_missing_file_of_a_rank_is_named(tmp_path):
    write(tmp_path, [0, 4, 7])
    (tmp_path / "shard_00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"shard_00001\.json is missing"):
        load_rank_state(tmp_path, {"w": FULL.clone()}, rank=0)


def test_a_checkpoint_of_another_model_is_an_error(tmp_path):
    RankState.of({"w": FULL}, {}, Origin(0, 0, 1)).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"'w' has shape \[7, 5\], the model has \[5, 7\]"):
        load_rank_state(tmp_path, {"w": torch.zeros(5, 7)}, rank=0)
    with pytest.raises(CheckpointError, match="'other'"):
        load_rank_state(tmp_path, {"other": torch.zeros(2)}, rank=0)


WRONG_INDEXES = {
    "blocks as a list": {"blocks": []},
    "a block as a number": {"blocks": {"w": 5}},
    "a block without a shape": {"blocks": {"w": {"offset": [0, 0]}}},
}


@pytest.mark.parametrize("name", WRONG_INDEXES)
def test_an_index_with_a_value_of_another_type_is_named(name, tmp_path):
    RankState.of({"w": FULL}, {}, Origin(0, 0, 1)).write(tmp_path)
    index = tmp_path / "shard_00000.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | WRONG_INDEXES[name]))
    with pytest.raises(CheckpointError, match=r"shard_00000\.json"):
        load_rank_state(tmp_path, {"w": FULL.clone()}, rank=0)


def test_scalars_and_random_states_are_restored(tmp_path):
    scalar = torch.tensor(3.5)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    RankState.of({"s": scalar}, {"step": 12}, Origin(0, 0, 1)).write(tmp_path)
    expected = [random.random(), np.random.rand(), torch.rand(1).item()]
    scalar.zero_()
    assert read_scalars(tmp_path) == {"step": 12}
    load_rank_state(tmp_path, {"s": scalar}, rank=0)
    assert scalar.item() == 3.5
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == expected


WHOLE = torch.arange(12.0).view(4, 3)


def rows(*numbers: int, name: str = "w") -> dict[str, Block]:
    return {
        f"{name}#{i}": Block(WHOLE[n : n + 1].clone(), (4, 3), (n, 0), True)
        for i, n in enumerate(numbers)
    }


def test_blocks_are_read_by_any_division_of_the_tensor(tmp_path):
    for rank, blocks in enumerate((rows(0, 2), rows(1, 3))):
        RankState.of(blocks, {}, Origin(0, rank, 2)).write(tmp_path)
    found = torch.zeros(4, 3)
    load_rank_state(tmp_path, {"w": found}, rank=0)
    assert torch.equal(found, WHOLE)
    part = Block(torch.zeros(2, 3), (4, 3), (1, 0), False)
    load_rank_state(tmp_path, {"w#7": part}, rank=0)
    assert torch.equal(part.data, WHOLE[1:3])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_the_written_tensors_are_those_that_safetensors_reads(tmp_path, dtype):
    tensors = {
        "a": torch.arange(6).view(2, 3).to(dtype),
        "transposed": torch.arange(6).view(2, 3).to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "other": torch.ones(3, dtype=torch.uint8),
    }
    saved = write_tensors(tmp_path / "x.safetensors", tensors, {"step": "3"})
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert read.keys() == tensors.keys()
    assert saved.digest == digest_file(tmp_path / "x.safetensors")
    assert saved.size == (tmp_path / "x.safetensors").stat().st_size


def test_a_dtype_that_a_checkpoint_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"'w' has dtype torch\.complex64"):
        write_tensors(tmp_path / "x.safetensors", {"w": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no other C library can return it")
def test_a_checkpoint_returns_free_memory_between_live_blocks(tmp_path):
    blocks, uss = [bytes([1]) * 100_000 for _ in range(600)], psutil.Process().memory_full_info
    del blocks[::2]
    before = uss().uss
    write_files(RankState.of({}, {}, Origin(0, 0, 1)), tmp_path)
    assert before - uss().uss > 20e6 and len(blocks) == 300
