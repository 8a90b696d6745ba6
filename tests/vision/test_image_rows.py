"""Images and 3-D positions stay with their rows, in every operation and on ranks."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import vision_cases as cases

from group_fixtures import ray_nightly
from quadriga.models.images import MultiModalRows
from quadriga.protocol import DataProto, fields, pad_dataproto_to_divisor, unpad_dataproto
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer import stages
from quadriga.trainer.stages import Balance


class Reader(Worker):
    """Says what arrived of images and positions."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, data):
        rows = MultiModalRows.of(data)
        sums = [float(e["pixel_values"].double().sum()) if e else 0.0 for e in rows.inputs]
        return DataProto.from_dict(
            {"sum": torch.tensor(sums), "seen": rows.position_ids, "rank": torch.full((len(data),),
                                                                                     self.rank)},
            {"grids": [e["image_grid_thw"].tolist() if e else [] for e in rows.inputs]},
        )  # fmt: skip

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data):
        """Return the images and positions as fields that the rank stores."""
        rows = MultiModalRows.of(data)
        return DataProto.from_dict(
            {fields.POSITION_IDS: rows.position_ids.clone()},
            {fields.MULTI_MODAL_INPUTS: list(rows.inputs)},
        )


@pytest.fixture(scope="module")
def batch(folder):
    found = cases.prompts(folder, n=2)
    assert found.batch[fields.POSITION_IDS].shape[:2] == (8, 3)
    return found


def same(data: DataProto, batch: DataProto, order: list[int]) -> bool:
    """Whether row i of `data` has the positions and images of row order[i] of `batch`."""
    found, expected = MultiModalRows.of(data), MultiModalRows.of(batch)
    positions = torch.equal(found.position_ids, expected.position_ids[order])
    pairs = zip(found.inputs, (expected.inputs[i] for i in order), strict=True)
    return positions and all(
        set(one) == set(other) and all(torch.equal(one[key], other[key]) for key in one)
        for one, other in pairs
    )


def saved_and_loaded(batch):
    content = io.BytesIO(pickle.dumps(batch))
    return pickle.load(content)


def through_a_file(batch, tmp_path):
    batch.save_to_disk(tmp_path / "batch")
    return DataProto.load_from_disk(tmp_path / "batch")


ORDER = [5, 0, 7, 2, 1, 6, 3, 4]
OPERATIONS = {
    "split and concat": (lambda b: DataProto.concat(b.split(3)), list(range(8))),
    "chunk and concat": (lambda b: DataProto.concat(b.chunk(4)[::-1]), [6, 7, 4, 5, 2, 3, 0, 1]),
    "repeat, interleaved": (lambda b: b.repeat(2), [i for i in range(8) for _ in range(2)]),
    "repeat, in blocks": (lambda b: b.repeat(2, interleave=False), [*range(8)] * 2),
    "select": (lambda b: b.select_idxs(ORDER), ORDER),
    "slice": (lambda b: b[2:5], [2, 3, 4]),
    "padding": (lambda b: pad_dataproto_to_divisor(b, 5)[0], [*range(8), 0, 1]),
    "unpadding": (lambda b: unpad_dataproto(pad_dataproto_to_divisor(b, 5)[0], 2), [*range(8)]),
    "union": (lambda b: b.select(batch_keys=[fields.INPUT_IDS]).union(
        b.select(batch_keys=[fields.POSITION_IDS], non_tensor_batch_keys=[])), [*range(8)]),
    "pickle": (saved_and_loaded, [*range(8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_images_and_positions_together(batch, name):
    operation, order = OPERATIONS[name]
    assert same(operation(batch), batch, order)
    assert not same(operation(batch), batch, [(i + 2) % 8 for i in order])


def test_reorder_and_balance_keep_them_together(folder):
    data = cases.responses(folder, cases.prompts(folder))
    sizes = data.batch[fields.SEQUENCE_LENGTH].tolist()
    number = {float(i): i for i in range(len(data))}
    data.batch["number"] = torch.arange(float(len(data)))
    balanced = stages.balance_over_ranks(data, Balance(2, shares_prompts=False)).batch
    order = [number[value] for value in balanced.batch["number"].tolist()]
    assert sorted(order) == list(range(8)) and order != list(range(8))
    assert same(balanced, data, order)
    assert [sizes[i] for i in order] == balanced.batch[fields.SEQUENCE_LENGTH].tolist()
    moved = data.select_idxs(list(range(8)))
    moved.reorder(torch.tensor(ORDER))
    assert same(moved, data, ORDER)


@ray_nightly
def test_two_ranks_receive_the_images_and_positions_of_their_rows(batch, start):
    group = start(Reader)
    for data, order in ((batch, [*range(8)]), (batch.select_idxs(ORDER), ORDER)):
        found = group.read(data)
        assert torch.equal(found.batch["seen"], batch.batch[fields.POSITION_IDS][order])
        assert found.batch["rank"].tolist() == [0] * 4 + [1] * 4
        images = MultiModalRows.of(batch).inputs
        expected = [images[i] for i in order]
        sums = [float(e["pixel_values"].double().sum()) if e else 0.0 for e in expected]
        assert found.batch["sum"].tolist() == pytest.approx(sums)
        grids = [e["image_grid_thw"].tolist() if e else [] for e in expected]
        assert list(found.non_tensor_batch["grids"]) == grids
    # Fields that ranks store, reordered by reference before the next call.
    stored = group.make(batch).select_idxs(ORDER)
    assert torch.equal(group.read(stored).batch["seen"], batch.batch[fields.POSITION_IDS][ORDER])
    assert same(stored, batch, ORDER)
