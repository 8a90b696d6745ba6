"""int64 fields are sent in the fewest bytes that hold their numbers, and arrive as int64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto, message, use_store
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.storage import InProcessStore, Origin, traffic


class OtherProcess(InProcessStore):
    """A store of values that are sent, as that of Ray."""

    in_process = False


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherProcess]:
    monkeypatch.setattr(message, "INLINE_BYTES", -1)
    store = OtherProcess()
    with use_store(store):
        yield store


def send(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what arrives, and the bytes that are stored."""
    traffic.reset()
    packed = pack_argument(DataProto.from_dict({"x": tensor}), OtherProcess())
    stored = traffic.snapshot().stored_bytes
    found = unpack_argument(packed).batch["x"]
    assert traffic.reset().fetched_bytes == stored
    return found, stored


LIMITS = [
    (0, 1, 1), (-128, 127, 1), (0, 128, 2), (-129, 0, 2), (-(2**15), 2**15 - 1, 2),
    (0, 2**15, 4), (-(2**31), 2**31 - 1, 4), (0, 2**31, 8), (-(2**31) - 1, 0, 8),
    (-(2**63), 2**63 - 1, 8),
]  # fmt: skip


@pytest.mark.parametrize(("low", "high", "itemsize"), LIMITS)
def test_numbers_take_the_fewest_bytes_that_hold_them(low, high, itemsize, sent):
    tensor = torch.zeros(40, 100, dtype=torch.int64)
    tensor[39, 98], tensor[39, 99] = low, high  # behind the numbers that are looked at first
    found, stored = send(tensor)
    assert found.dtype == torch.int64 and torch.equal(found, tensor)
    assert stored == 40 * 100 * itemsize
    found.add_(1)
    assert tensor[0, 0] == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(40, 100),
        torch.ones(40, 100, dtype=torch.bool),
        torch.ones(40, 100, dtype=torch.int32),
        torch.ones(40, 2, dtype=torch.int64),
        torch.full((40, 100), 2**40),
        torch.zeros(0, 100, dtype=torch.int64),
    ],
    ids=["float32", "bool", "int32", "few", "large", "empty"],
)
def test_other_fields_are_sent_as_they_are(tensor, sent):
    found, stored = send(tensor)
    assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    assert stored == tensor.numel() * tensor.element_size()


def test_a_field_within_a_process_is_not_copied_to_fewer_bytes(monkeypatch):
    monkeypatch.setattr(message, "INLINE_BYTES", -1)
    traffic.reset()
    batch = DataProto.from_dict({"x": torch.ones(40, 100, dtype=torch.int64)})
    pack_argument(batch, InProcessStore())
    assert traffic.reset().stored_bytes == 40 * 100 * 8


@pytest.mark.parametrize("rows", [3, 100])
def test_shards_of_different_sizes_are_one_field(rows, sent):
    """Ranks whose ids fit into 1, 2, 4 and 8 bytes; rows in any order, also one by one."""
    tops = (10, 1000, 2**20, 2**40)
    parts = [torch.full((rows, 200), top) + torch.arange(rows)[:, None] for top in tops]
    results = [
        unpack_result(pack_result(DataProto.from_dict({"x": part}), Origin("W", rank, "m")))
        for rank, part in enumerate(parts)
    ]
    traffic.reset()
    joined, expected = DataProto.concat(results), torch.cat(parts)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))
    joined.reorder(order)
    assert torch.equal(joined.batch["x"], expected[order])
    assert traffic.reset().fetched_bytes == rows * 200 * (1 + 2 + 4 + 8)


def test_permuted_rows_of_one_shard_are_widened(sent):
    tensor = torch.arange(100)[:, None].expand(100, 200)
    batch = unpack_argument(pack_argument(DataProto.from_dict({"x": tensor})))
    batch.reorder(torch.arange(99, -1, -1))
    assert torch.equal(batch.batch["x"], tensor.flip(0)) and batch.batch["x"].dtype == torch.int64


def test_the_bytes_of_a_batch_that_is_stored_once(sent):
    batch = DataProto.from_dict({"mask": torch.ones(64, 2048, dtype=torch.int64)})
    traffic.reset()
    for _ in range(3):
        pack_argument(batch)
    assert traffic.snapshot().stored_bytes == 64 * 2048
    batch.batch["mask"].numpy()[0, 0] = 0
    pack_argument(batch)
    assert traffic.reset().stored_bytes == 2 * 64 * 2048


# A step of GRPO and of PPO: rows, prompt and response tokens, a vocabulary above 2**15.
B, P, R, VOCABULARY = 16, 256, 512, 150_000
BYTES_OF_TOKEN = {
    # field: (columns, bytes of an entry as it is sent, bytes of its dtype)
    "input_ids": (P + R, 4, 8),
    "attention_mask": (P + R, 1, 8),
    "response_mask": (R, 1, 8),
    "responses": (R, 4, 8),
    "prompts": (P, 4, 8),
    "position_ids": (P + R, 2, 8),
    **dict.fromkeys(
        ("rollout_log_probs", "advantages", "returns", "values", "ref_log_prob"), (R, 4, 4)
    ),
}


def step_fields() -> dict[str, torch.Tensor]:
    """Return the fields of a step that have a column for each token, in their dtypes."""
    ids = torch.arange(B * (P + R)).view(B, P + R) * 7919 % VOCABULARY
    mask = torch.ones(B, P + R, dtype=torch.int64)
    mask[:, :5] = 0
    made = {
        "input_ids": ids, "attention_mask": mask, "response_mask": mask[:, P:],
        "responses": ids[:, P:], "prompts": ids[:, :P], "position_ids": mask.cumsum(1) - 1,
    }  # fmt: skip
    return {name: made.get(name, torch.rand(B, R)) for name in BYTES_OF_TOKEN}


def test_numpy_arrays_keep_their_dtype(sent):
    array = np.arange(4000).reshape(40, 100)
    traffic.reset()
    packed = pack_argument(DataProto.from_dict(non_tensors={"x": array}))
    assert traffic.reset().stored_bytes == array.nbytes
    assert unpack_argument(packed).non_tensor_batch["x"].dtype == array.dtype
