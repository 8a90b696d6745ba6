"""Rows that a call adds so that a batch divides have weight zero in an update."""

import numpy as np
import padded_cases
import pytest
import torch
from padded_cases import CASES

from quadriga.algorithms.aggregation import merge_partials
from quadriga.errors import LengthError
from quadriga.protocol.dataproto import PADDING_FIELD
from rank_groups import fork_ranks


def results_on(ranks: int, folder: str, path) -> list:
    if ranks == 1:
        return [{case: padded_cases.result_of(*case, folder) for case in CASES}]
    files = str(path / f"{ranks}_{{rank}}.pt")
    fork_ranks(padded_cases.rank_main, ranks, folder, files, limit=200.0)
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


@pytest.mark.parametrize(
    ("rows", "added"), [(5, 0), (6, 1)], ids=["an odd number", "a row whose partner is padding"]
)
def test_a_row_without_a_partner_is_refused(folder, rows, added):
    worker = padded_cases.worker_of("update_rm", folder, rows)
    worker.init_model()
    data = padded_cases.batch(rows)
    data.non_tensor_batch[PADDING_FIELD] = np.arange(rows) >= rows - added
    with pytest.raises(LengthError, match=f"on 1 ranks a row has no partner .{rows} rows"):
        worker.update_rm(data)
