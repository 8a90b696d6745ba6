"""Images and 3-D positions stay with their rows, in every operation and on ranks."""

import pytest
import torch
import vision_cases as cases

from group_fixtures import ray_nightly
from quadriga.models.images import MultiModalRows
from quadriga.protocol import DataProto, fields
from quadriga.single_controller import Dispatch, Worker, register


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


@pytest.fixture(scope="module")
def batch(folder):
    found = cases.prompts(folder, n=2)
    assert found.batch[fields.POSITION_IDS].shape[:2] == (8, 3)
    return found


ORDER = [5, 0, 7, 2, 1, 6, 3, 4]


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
