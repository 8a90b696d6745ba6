"""Ranks that compute the same rows together give the update of one rank.

`parallel_cases` has the models and the updates.
"""

import conformance
import parallel_cases as cases
import pytest
import torch
from parallel_cases import Case
from transformers import Gemma3nTextConfig, GPT2Config, LlamaConfig, MambaConfig

from quadriga.config.schema import EngineConfig
from quadriga.engines.tensor_parallel import check_model_parallel
from quadriga.errors import ConfigError
from rank_groups import fork_ranks

FOUR_RANKS = [
    (Case("llama"), (2, 2, 1), ()),
    (Case("llama", "packed", aggregation="seq-mean-token-mean"), (1, 1, 4), ()),
    (Case("qwen2 tied", lora=True, aggregation="seq-mean-token-sum"), (2, 1, 1), ()),
    (Case("qwen2 tied", aggregation="seq-mean-token-sum-norm"), (1, 4, 1), ()),
    (Case("gemma3", checkpointing=True), (1, 2, 2), ()),
    (Case("qwen3", dtype="float32", checkpointing="selective"), (2, 1, 1), (("fsdp_size", 1),)),
    (Case("gemma3", "packed", lora=True), (1, 2, 1), (("fsdp_size", 2), ("fused_head", True))),
    (Case("mixtral", "routed", micro=None), (2, 1, 2), ()),
    (Case("qwen3_moe", "packed", lora=True), (2, 1, 1), ()),
]
"""(case, (tensor, sequence, context), settings of the engine), each on four ranks: pairs that have
each value of each choice."""


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory):
    return cases.write_models(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def one_rank(model_folders, tmp_path_factory):
    """A checkpoint of one rank after an update, and the weights then."""
    folder = tmp_path_factory.mktemp("results")
    case = Case("qwen2 tied", lora=True)
    with cases.wide():
        engine = cases.build(model_folders["qwen2 tied"], case)
        cases.update(engine, case)
        engine.save(folder / cases.STATES / "one_rank")
        first = cases.weights(engine)
        cases.update(engine, case)
    return folder, first, engine


@pytest.fixture(scope="module")
def on_four_ranks(model_folders, one_rank):
    results = str(one_rank[0] / "found.pt")
    fork_ranks(cases.rank_main, 4, model_folders, FOUR_RANKS, results, limit=170)
    # The file was written by `rank_main`; its keys are dataclasses, which need pickle.
    return torch.load(results, weights_only=False)


@pytest.mark.parametrize("wanted", FOUR_RANKS, ids=lambda wanted: f"{wanted[0].model}-{wanted[1]}")
def test_ranks_that_split_rows_make_the_update_of_one_rank(wanted, on_four_ranks, model_folders):
    case, _, _ = wanted
    found, metrics, before = on_four_ranks[wanted]
    expected, expected_metrics, passes = cases.result_of(
        model_folders[case.model], case, (1, 1, 1), 0, 1
    )
    tolerance = cases.TOLERANCES[case.dtype]
    assert cases.largest_difference(found, expected) < tolerance
    start = cases.weights(cases.build(model_folders[case.model], case))
    assert cases.largest_difference(expected, start) > 1e-3  # the update changed something
    for name, values in before.items():
        assert torch.allclose(values, passes[name][: len(values)], atol=1e-5), name
    assert {"actor/loss", "actor/grad_norm"} <= metrics.keys() == expected_metrics.keys()
    for name in metrics.keys() - {"actor/micro_batches"}:
        assert metrics[name] == pytest.approx(expected_metrics[name], abs=100 * tolerance), name


def test_scores_and_updates_from_pairs_are_those_of_one_rank(on_four_ranks, model_folders):
    found, case = on_four_ranks[cases.STATES], Case("llama")
    with cases.wide():
        scorer = cases.build(model_folders["llama"], case, head="score")
        metrics = [cases.update_scores(scorer, case) for _ in range(2)]
        scores = scorer.forward(cases.pair_rows())["values"]
        assert cases.largest_difference(found["scorer"], cases.weights(scorer)) < 1e-10
    # A new head is zero: the first step trains the head alone, the second one all weights.
    assert metrics[0]["rm/difference"] == 0 < metrics[1]["rm/difference"]
    for one, four in zip(metrics, found["pairs"], strict=True):
        for name in ("rm/loss", "rm/accuracy", "rm/difference", "rm/grad_norm"):
            assert four[name] == pytest.approx(one[name], rel=1e-6, abs=1e-9), name
    assert (scores != 0).sum() == 8  # one number for each row
    assert torch.allclose(found["scores"], scores, atol=1e-6)


def test_a_checkpoint_of_one_rank_continues_on_four(on_four_ranks, one_rank):
    _, first, engine = one_rank
    found = on_four_ranks[cases.STATES]
    assert cases.largest_difference(found["loaded"], first) == 0
    # The moments were loaded too: the second update is that of the engine that made the first.
    assert cases.largest_difference(found["after"], cases.weights(engine)) < 1e-10


def test_the_reference_is_the_base_of_divided_weights(on_four_ranks, model_folders):
    with cases.wide():
        reference = cases.build(model_folders["qwen2 tied"], Case("qwen2 tied"), trained=False)
        expected = reference.forward(cases.make_batch("shared"))["log_probs"]
    assert torch.allclose(on_four_ranks[cases.STATES]["base"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        ("llama", {"sequence_parallel_size": 3}, r"3 does not divide the 4 .* \(4 = 1 × 3 \+ 1\)"),
        (
            "llama",
            {"tensor_parallel_size": 4},
            r"divide the 2 key heads .*\(2 = 0 × 4 \+ 2\)",
        ),
        (
            "llama",
            {"tensor_parallel_size": 2, "sequence_parallel_size": 4},
            "divide the 2 attention",
        ),
        ("gpt2", {"tensor_parallel_size": 2}, "'gpt2' has no plan of tensor parallelism"),
        ("gemma3n", {"sequence_parallel_size": 2}, "'gemma3n_text' were not found equal"),
        ("mamba", {"sequence_parallel_size": 2}, "'mamba' is computed with padded rows"),
        ("longrope", {"context_parallel_size": 2}, "rope_type 'longrope'"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_divided_are_refused(model, sizes, words):
    kinds = {"gpt2": GPT2Config, "mamba": MambaConfig, "gemma3n": Gemma3nTextConfig}
    config = kinds[model]() if model in kinds else LlamaConfig(**conformance.SIZES)
    if model == "longrope":
        config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=words):
        check_model_parallel(config, EngineConfig(**sizes), "actor.engine")
