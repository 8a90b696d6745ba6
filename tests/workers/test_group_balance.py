"""The parameters after an update do not depend on how prompt groups are spread over ranks.

The reference computes the batch on one rank, padded, in one micro-batch per mini-batch.
"""

import group_cases
import pytest
import torch
from group_cases import CASES, Case

pytestmark = pytest.mark.timeout(900)
torch.set_num_threads(1)
BATCHES = dict(group_cases.cases_by_batch())


@pytest.fixture(scope="module")
def expected(folder) -> dict[Case, dict[str, torch.Tensor]]:
    return {
        case: group_cases.parameters_after(folder, plain, 0, 1, packed=False)
        for plain, cases in BATCHES.items()
        for case in cases
    }


RANKS = (2, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 3, 4)))


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def found(request, folder, tmp_path_factory) -> dict[Case, dict[str, torch.Tensor]]:
    if request.param == 1:
        return {case: group_cases.parameters_after(folder, case, 0, 1) for case in CASES}
    file = tmp_path_factory.mktemp("ranks") / "parameters.pt"
    return group_cases.run_ranks(request.param, folder, str(file))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_parameters_after_an_update_are_equal(found, expected, case) -> None:
    if case not in found:
        pytest.skip("the rows of a mini-batch do not divide by the number of ranks")
    assert found[case].keys() == expected[case].keys()
    for name, value in expected[case].items():
        torch.testing.assert_close(found[case][name], value, atol=1e-10, rtol=0, msg=name)


def test_the_updates_change_the_parameters(expected) -> None:
    """Otherwise the comparison would say nothing. Every batch gives other parameters."""
    first = next(iter(expected.values())).keys()
    name = next(name for name in first if "q_proj" in name)
    values = [expected[cases[0]][name] for cases in BATCHES.values()]
    assert len({float(value.sum()) for value in values}) == len(values)


def test_only_three_ranks_have_fewer_cases() -> None:
    counts = {ranks: len(group_cases.cases_on(ranks)) for ranks in (1, 2, 3, 4)}
    assert counts == {1: len(CASES), 2: len(CASES), 3: len(CASES) - 5, 4: len(CASES)}
