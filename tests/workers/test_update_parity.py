"""The parameters after an update are the same, however the update is computed.

All combinations of row form × micro-batch × aggregation × checkpointing × group balance × source of
the old log-probabilities, on 1, 2 and 4 ranks, against an independent update, in float64. `make
test` takes a sample in which every pair of choices occurs, on 1 and 2 ranks; `make nightly` takes
the sample on 4 ranks, and all 480 combinations on 1, 2 and 4.
"""

from itertools import product
from typing import get_args

import parity_cases
import pytest
import torch
from parity_cases import WAYS, Form, sample

from quadriga.config.schema import AggregationName
from rank_groups import fork_ranks

TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def expected(folder, tmp_path_factory) -> str:
    """A file of the independent updates, by row form and aggregation."""
    file = str(tmp_path_factory.mktemp("expected") / "parameters.pt")
    keys = product(get_args(Form), get_args(AggregationName))
    torch.save({key: parity_cases.independent_update(folder, *key) for key in keys}, file)
    return file


def differences(ways, ranks, folder, expected, tmp_path) -> dict[parity_cases.Way, float]:
    if ranks == 1:
        return parity_cases.differences(folder, ways, expected, 0, 1)
    file = str(tmp_path / "differences.pt")
    fork_ranks(parity_cases.rank_main, ranks, folder, ways, expected, file, limit=3000.0)
    return dict(zip(ways, torch.load(file, weights_only=True), strict=True))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_pair_of_choices_gives_the_same_parameters(ranks, folder, expected, tmp_path):
    found = differences(sample(), ranks, folder, expected, tmp_path)
    assert {way: by for way, by in found.items() if not by <= TOLERANCE} == {}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_combination_gives_the_same_parameters(ranks, folder, expected, tmp_path):
    found = differences(WAYS, ranks, folder, expected, tmp_path)
    assert len(found) == 480
    assert {way: by for way, by in found.items() if not by <= TOLERANCE} == {}


def test_the_sample_has_every_pair_and_is_small():
    assert parity_cases.pairs_of(sample()) == parity_cases.pairs_of(WAYS)
    assert len(sample()) < 40


def test_the_independent_updates_differ(folder, expected):
    """Otherwise the comparison would say nothing."""
    stored = torch.load(expected, weights_only=True)
    sums = {float(sum(p.double().sum() for p in parameters.values()))
            for parameters, _ in stored.values()}  # fmt: skip
    # The gradient is clipped to the same norm for two aggregations that differ by a factor only.
    assert len(sums) >= 2 * len(get_args(Form))
