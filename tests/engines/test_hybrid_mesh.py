"""Two replicas of two shards each: the numbers of one rank."""

from __future__ import annotations

import engine_cases
import hybrid_cases as cases
import optimizer_cases
import pytest
import step_cases
import torch

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    step_cases.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def four_ranks(folder, tmp_path_factory):
    results = str(tmp_path_factory.mktemp("ranks") / "found.pt")
    engine_cases.run_ranks(cases.RANKS, cases.rank_main, str(folder), results, wait_s=500)
    # The file was written by `rank_main`; its keys are dataclasses, which need pickle.
    return torch.load(results, weights_only=False)


@pytest.mark.parametrize("case", cases.STEPS_OF, ids=str)
def test_steps_equal_those_of_one_rank(case, folder, four_ranks):
    norms, weights, _ = four_ranks[case]
    engine = optimizer_cases.build(str(folder), case[0], "float64")
    assert optimizer_cases.steps(engine, engine_cases.make_batch()) == pytest.approx(norms)
    expected = dict(engine.state_stream())
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", cases.STEPS_OF, ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_on_all(case, four_ranks):
    assert four_ranks[case][2] == (cases.RANKS, 0.0)
