"""The update of one rank, in every division over two and four ranks, for every kind of update."""

from __future__ import annotations

import functools
from itertools import product

import engine_cases
import parallel_cases as cases
import pytest
import torch
import transformers
from parallel_cases import AGGREGATIONS, Case

from quadriga.engines.tensor_parallel import TESTED

WAIT_S = 3600
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(WAIT_S)]

DIVISIONS = {
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2)],
}
"""Ranks -> (tensor, sequence, context). The other factor of the ranks is data parallel."""


def cases_of(model: str) -> list[Case]:
    """Return every kind of update of a model in float64, and one in float32."""
    kinds = product(("packed", "shared"), (False, True), AGGREGATIONS)
    updates = [Case(model, rows, lora, aggregation) for rows, lora, aggregation in kinds]
    return [*updates, Case(model, dtype="float32")]


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    return cases.write_models(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def expected(model_folders):
    """expected(model) returns the results of one rank, which are computed once."""

    @functools.cache
    def of_model(model: str):
        folder = model_folders[model]
        return {case: cases.result_of(folder, case, (1, 1, 1), 0, 1) for case in cases_of(model)}

    return of_model


# The ranks of one model are computed one after the other, so that one rank is computed once.
@pytest.mark.parametrize("ranks", DIVISIONS)
@pytest.mark.parametrize("model", cases.MODELS)
def test_every_division_makes_the_update_of_one_rank(
    model, ranks, expected, model_folders, tmp_path
):
    wanted = [[(case, degrees, ()) for case in expected(model)] for degrees in DIVISIONS[ranks]]
    args = (ranks, model_folders, wanted, str(tmp_path))
    engine_cases.run_ranks(1, cases.fork_divisions, *args, wait_s=WAIT_S)
    found = {}
    for number in range(len(wanted)):
        # The keys are dataclasses, which need pickle.
        found |= torch.load(tmp_path / f"{number}.pt", weights_only=False)
    assert len(found) == sum(map(len, wanted))
    wrong = {}
    for key, (weights, metrics, before) in found.items():
        one, one_metrics, passes = expected(model)[key[0]]
        tolerance = cases.TOLERANCES[key[0].dtype]
        difference = cases.largest_difference(weights, one)
        norm = abs(metrics["actor/grad_norm"] - one_metrics["actor/grad_norm"])
        own = before["log_probs"] - passes["log_probs"][: len(before["log_probs"])]
        if difference > tolerance or norm > 100 * tolerance or float(own.abs().max()) > 1e-5:
            wrong[key] = (difference, norm, float(own.abs().max()))
    assert not wrong


def test_every_architecture_with_a_plan_is_compared():
    prefixes = (prefix for prefix, _ in cases.MODELS.values())
    compared = {getattr(transformers, f"{prefix}Config").model_type for prefix in prefixes}
    assert compared == set(TESTED)
