"""Every loss and every aggregation gives the update of FSDP on one rank, however Megatron-core
divides the work."""

from __future__ import annotations

import conformance
import engine_cases
import loss_cases
import pytest
import torch
from conformance import Subject
from loss_cases import CASES

TENSOR, STAGES, CONTEXT = (f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "context"))
LAYOUTS = {
    "cp2 pp2": {CONTEXT: 2, STAGES: 2},
    "cp2 dp2": {CONTEXT: 2},
    "tp2 pp2": {TENSOR: 2, STAGES: 2},
    "tp2 sp dp2": {TENSOR: 2, "sequence_parallel": True},
}
SAMPLE = [*CASES[::6], CASES[-1]]
"""Updates of `make test`: several losses and aggregations, and the critic. All run nightly."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    pytest.importorskip("megatron.core")
    root = tmp_path_factory.mktemp("losses")
    conformance.write_models(root, ["qwen2 tied"])
    return root


@pytest.fixture(scope="module")
def expected(root):
    """Return the updates of FSDP on one rank, made when they are asked for."""
    update = loss_cases.Updates(Subject("one rank", "qwen2 tied"), root)
    made = {}

    def one_rank(case):
        if str(case) not in made:
            made[str(case)] = update(case)
        return made[str(case)]

    return one_rank


def found_by(root, layout: str, cases: list[loss_cases.Case]) -> dict[str, dict]:
    """Return the updates of Megatron-core on four ranks."""
    settings = {"name": "megatron", **LAYOUTS[layout]}
    subject = Subject(f"{layout} {len(cases)}", "qwen2 tied", settings=settings)
    engine_cases.run_ranks(4, loss_cases.rank_main, 4, str(root), subject, cases, wait_s=500)
    return torch.load(root / f"{subject.name}.pt")


@pytest.fixture(scope="module")
def some(root):
    return found_by(root, "cp2 pp2", SAMPLE)


@pytest.fixture(scope="module", params=LAYOUTS)
def every(root, request):
    return found_by(root, request.param, CASES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_an_update_is_that_of_fsdp_on_one_rank(expected, some, case):
    check(case, expected(case), some[str(case)])


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_update_is_that_of_fsdp_in_every_layout(expected, every, case):
    check(case, expected(case), every[str(case)])


def check(case, expected, found) -> None:
    prefix = "critic" if case.loss == loss_cases.CRITIC else "actor"
    assert expected["metrics"][f"{prefix}/grad_norm"] > 1e-3
    for name in ("loss", "grad_norm", "lr"):
        wanted = expected["metrics"][f"{prefix}/{name}"]
        value = found["metrics"][f"{prefix}/{name}"]
        assert value == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(
            found["weights"][name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
