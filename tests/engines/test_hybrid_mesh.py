"""Two replicas of two shards each: the numbers of one rank, and the memory of the plan."""

from __future__ import annotations

import engine_cases
import hybrid_cases as cases
import memory_cases
import optimizer_cases
import pytest
import step_cases
import torch

TOLERANCE = 0.15


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    gpt2, models = (tmp_path_factory.mktemp(name) for name in ("gpt2", "models"))
    step_cases.write_model(gpt2)
    memory_cases.write_models(models)
    return gpt2, models


@pytest.fixture(scope="module")
def four_ranks(folders, tmp_path_factory):
    results = str(tmp_path_factory.mktemp("ranks") / "found.pt")
    engine_cases.run_ranks(cases.RANKS, cases.rank_main, *map(str, folders), results, wait_s=500)
    # The file was written by `rank_main`; its keys are dataclasses, which need pickle.
    return torch.load(results, weights_only=False)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases.STEPS_OF, ids=str)
def test_steps_equal_those_of_one_rank(case, folders, four_ranks):
    norms, weights, _ = four_ranks[0][case]
    engine = optimizer_cases.build(str(folders[0]), case[0], "float64")
    assert optimizer_cases.steps(engine, engine_cases.make_batch()) == pytest.approx(norms)
    expected = dict(engine.state_stream())
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases.STEPS_OF, ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(case, four_ranks):
    assert four_ranks[0][case][2] == (cases.RANKS, 0.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases.PLANS, ids=str)
def test_the_plan_is_what_a_rank_allocates(case, folders, four_ranks):
    plan = memory_cases.planned(case, folders[1], ranks=cases.RANKS)
    found = four_ranks[1][case]
    assert (plan.parameters, plan.optimizer) == (found.parameters, found.optimizer)
    assert plan.update_peak == pytest.approx(found.update, rel=TOLERANCE)
    assert plan.step_peak == pytest.approx(found.step, rel=TOLERANCE)
    assert plan.evaluate_peak == pytest.approx(found.evaluate, rel=TOLERANCE)
