"""The memory of a Megatron engine, computed from a config.json, against what its ranks allocate."""

from dataclasses import replace
from pathlib import Path

import megatron_memory_cases as cases
import pytest
import torch
from megatron_memory_cases import Case
from transformers import AutoModelForCausalLM

from memory_models import CONFIGS
from rank_groups import fork_ranks

TOLERANCE = 0.15
TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
SPLIT_TOKENS = TENSOR | {"sequence_parallel": True}
CASES = [
    Case("tp2", settings=TENSOR),
    Case("tp2 sp checkpointed", checkpointing=True, settings=SPLIT_TOKENS),
    Case("tp2 entropy", settings=TENSOR, entropy="value"),
    Case("tp2 tied", "qwen2 deep", settings=TENSOR),
    Case("pp2", settings=STAGES),
    Case("pp2 checkpointed", checkpointing=True, settings=STAGES),
    Case("pp2 interleaved", settings=STAGES | {"virtual_pipeline_parallel_size": 2}),
    Case("dp2"),
    Case("dp2 replicated", settings={"distributed_optimizer": False}),
    Case("cp2", settings=CONTEXT),
    Case("values tp2", head="value", settings=TENSOR),
    Case("bf16 dp2", settings={"dtype": "bfloat16"}),
]
ON_FOUR = [
    Case("tp2 sp cp2", settings=SPLIT_TOKENS | CONTEXT),
    Case("cp2 pp2 checkpointed", checkpointing=True, settings=CONTEXT | STAGES),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    for name, family in (("llama deep", "llama untied"), ("qwen2 deep", "qwen2 tied")):
        torch.manual_seed(0)
        config = cases.longer(CONFIGS[family](), 4)
        AutoModelForCausalLM.from_config(config).save_pretrained(path / name)
    CONFIGS["qwen3 experts"]().save_pretrained(path / "experts")
    return path


@pytest.fixture(scope="module")
def two_ranks(folder):
    pytest.importorskip("megatron.core")
    fork_ranks(cases.measure_on_ranks, 2, str(folder), CASES, limit=500)
    # Written by `measure_on_ranks`.
    return torch.load(folder / "2.pt", weights_only=False)


@pytest.fixture(scope="module")
def four_ranks(folder):
    pytest.importorskip("megatron.core")
    fork_ranks(cases.measure_on_ranks, 4, str(folder), ON_FOUR, limit=500)
    return torch.load(folder / "4.pt", weights_only=False)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_what_each_rank_allocates(case, folder, two_ranks):
    check_plan(case, folder, two_ranks[case.name])


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_the_plan_is_what_each_of_four_ranks_allocates(case, folder, four_ranks):
    check_plan(case, folder, four_ranks[case.name])


def check_plan(case: Case, folder: Path, found: list[dict[str, int]]) -> None:
    for stage, plan in enumerate(cases.planned(case, folder, ranks=len(found))):
        ranks = [rank for rank in found if rank["stage"] == stage]
        largest = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        assert plan.held["parameters"] == largest["parameters"]
        assert plan.held["optimizer states"] == largest["moments"]
        assert plan.held["gradients"] == largest["gradients"]
        assert plan.peak("backward") == pytest.approx(largest["update"], rel=TOLERANCE)
        assert plan.peak("evaluate") == pytest.approx(largest["evaluate"], rel=TOLERANCE)


def test_states_are_those_of_the_stages_and_of_the_tensors_that_a_rank_updates(folder):
    (tied,) = cases.planned(Case("tp2 tied", "qwen2 deep", settings=TENSOR), folder, ranks=2)
    first, last = cases.planned(Case("pp2 tied", "qwen2 deep", settings=STAGES), folder, ranks=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "qwen2 deep")
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    tied, first, last = tied.held, first.held, last.held
    whole = sum(sizes.values())
    assert tied["parameters"] == tied["gradients"] == (whole - norms) // 2 + norms
    # Both stages have the tied embedding; the last one has the last norm.
    both = first["parameters"] + last["parameters"]
    assert both == whole + sizes["model.embed_tokens.weight"]
    assert last["parameters"] - first["parameters"] == sizes["model.norm.weight"]
    (half,) = cases.planned(Case("dp2"), folder, ranks=2)
    (whole,) = cases.planned(Case("dp1"), folder, ranks=1)
    states = whole.held["optimizer states"]
    assert states == 2 * whole.held["parameters"]
    assert half.held["optimizer states"] == pytest.approx(states / 2, rel=0.01)


def test_stages_keep_the_activations_of_micro_batches_in_flight(folder):
    four = Case("pp4", settings={"pipeline_parallel_size": 4})
    peaks = [plan.peak("backward") for plan in cases.planned(four, folder, ranks=4)]
    # Each stage has the same number of layers; the last one has the logits too.
    assert peaks[0] - peaks[1] == peaks[1] - peaks[2] > 0.7 * peaks[0] / 4


def test_tokens_limit_the_micro_batches_in_flight_beside_rows(monkeypatch, folder):
    """Sixteen rows of 80 tokens, four with one prompt: micro-batches of eight rows, or of two."""
    settings = {"pipeline_parallel_size": 4, "max_tokens_per_micro_batch": 2 * 80}
    monkeypatch.setattr(cases, "ROWS", replace(cases.ROWS, micro_batch=8))
    few = cases.planned(Case("by rows and tokens", settings=settings), folder, ranks=4)
    monkeypatch.setattr(cases, "ROWS", replace(cases.ROWS, micro_batch=None))
    by_tokens = cases.planned(Case("by tokens", settings=settings), folder, ranks=4)
    assert [plan.adds for plan in few] == [plan.adds for plan in by_tokens]


def test_activations_of_experts_are_named_as_missing(folder):
    settings = {"expert_parallel_size": 2}
    (plan,) = cases.planned(Case("ep2", "experts", settings=settings), folder, ranks=2)
    assert plan.missing == "Megatron-core's layers with experts are not simulated"
    (all_experts,) = cases.planned(Case("dp2", "experts"), folder, ranks=2)
    assert plan.held["parameters"] < all_experts.held["parameters"]
