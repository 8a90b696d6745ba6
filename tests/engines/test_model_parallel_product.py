"""The update of one rank, in every division over two and four ranks, for every kind of update."""

from __future__ import annotations

from itertools import product

import engine_cases
import parallel_cases as cases
import pytest
import torch
from parallel_cases import AGGREGATIONS, Case

pytestmark = pytest.mark.nightly

DIVISIONS = {
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2)],
}
"""Ranks -> (tensor, sequence, context). The other factor of the ranks is data parallel."""

UPDATES = [
    Case(model, rows, lora, aggregation)
    for model, rows, lora, aggregation in product(
        cases.MODELS, ("packed", "shared"), (False, True), AGGREGATIONS
    )
]
WIDTHS = [Case(model, dtype="float32") for model in cases.MODELS]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("parallel")
    for name in cases.MODELS:
        cases.write_model(name, root / name)
    return {name: str(root / name) for name in cases.MODELS}


@pytest.fixture(scope="module")
def expected(model_folders):
    return {
        case: cases.result_of(model_folders[case.model], case, (1, 1, 1), 0, 1)
        for case in (*UPDATES, *WIDTHS)
    }


@pytest.mark.parametrize("ranks", DIVISIONS)
def test_every_division_makes_the_update_of_one_rank(
    ranks, expected, model_folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine_cases, "WAIT_S", 3600)
    wanted = [(c, degrees, ()) for c in expected for degrees in DIVISIONS[ranks]]
    results = str(tmp_path / "found.pt")
    engine_cases.run_ranks(1, cases.fork_ranks, ranks, model_folders, wanted, results)
    found = torch.load(results, weights_only=False)  # its keys are dataclasses
    assert len(found) == len(wanted)
    wrong = {}
    for key, (weights, metrics, before) in found.items():
        one, one_metrics, passes = expected[key[0]]
        tolerance = cases.TOLERANCES[key[0].dtype]
        difference = cases.largest_difference(weights, one)
        norm = abs(metrics["actor/grad_norm"] - one_metrics["actor/grad_norm"])
        own = before["log_probs"] - passes["log_probs"][: len(before["log_probs"])]
        if difference > tolerance or norm > 100 * tolerance or float(own.abs().max()) > 1e-5:
            wrong[key] = (difference, norm, float(own.abs().max()))
    assert not wrong
