"""Rows that a call adds so that a batch divides have weight zero in an update."""

from __future__ import annotations

import padded_cases
import pytest
import torch
from padded_cases import CASES

from quadriga.algorithms.aggregation import merge_partials
from quadriga.backends import get_backend
from quadriga.errors import LengthError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Dispatch,
    Worker,
    register,
)
from quadriga.workers import PairTrainingWorker
from rank_groups import spawn_ranks


def results_on(ranks: int, folder: str, path) -> list:
    if ranks == 1:
        return [{case: padded_cases.result_of(*case, folder) for case in CASES}]
    files = str(path / f"{ranks}_{{rank}}.pt")
    spawn_ranks(padded_cases.rank_main, ranks, folder, files, limit=200.0)
    # This test wrote the files.
    return [torch.load(files.format(rank=rank), weights_only=False) for rank in range(ranks)]


def metrics_of(results: list, case) -> dict[str, float]:
    """Return the metrics of an update as `RunRecord` makes them of the reports of all ranks."""
    partials = [partial for result in results for partial in result[case][1]]
    return {**results[0][case][0], **merge_partials(partials)}


@pytest.mark.timeout(240)
def test_a_padded_update_equals_that_of_one_rank(folder, tmp_path):
    single, padded = (results_on(ranks, folder, tmp_path) for ranks in (1, 3))
    for case in CASES:
        weights, expected = padded[0][case][2], single[0][case][2]
        by = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        assert by <= 1e-10, case
        wanted = metrics_of(single, case)
        assert metrics_of(padded, case) == pytest.approx(wanted, rel=1e-6, abs=1e-10), case


def group(kind, ranks: int, *args):
    backend = get_backend("local")
    return backend.worker_group(
        backend.resource_pool([ranks]), backend.class_with_args(kind, *args)
    )


class Pairs(PairTrainingWorker):
    """Says which rows it received."""

    def __init__(self):
        Worker.__init__(self)
        self._register_dispatch_collect_info("reward_model", self.rank, True)

    def update_rm(self, data):
        return DataProto(meta_info={"metrics": {"rows": data.batch["row"].tolist()}})


@pytest.mark.parametrize(
    ("rows", "padding", "message"),
    [(6, False, "multiple of 4 rows, or enable padding"), (7, True, r"multiple of 4 rows\.")],
)
def test_pairs_that_do_not_divide_are_refused_before_they_are_sent(rows, padding, message):
    data = DataProto.from_dict({"row": torch.arange(rows)}, auto_padding=padding)
    with pytest.raises(LengthError, match=message):
        group(Pairs, 2).update_rm(data)


class Echo(Worker):
    """Returns its rows."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, data):
        return data


@pytest.mark.parametrize("arrived", [False, True], ids=["a batch", "a future that has arrived"])
def test_pairs_stay_together_in_padded_parts(arrived):
    data = DataProto.from_dict({"row": torch.arange(6)}, auto_padding=True)
    if arrived:
        data = group(Echo, 3).echo(data)
        assert len(data.arrived()) == 6
    metrics = group(Pairs, 2).update_rm(data).meta_info["metrics"]
    assert metrics == {"rows": [[0, 1, 2, 3], [4, 5, 0, 1]]}
