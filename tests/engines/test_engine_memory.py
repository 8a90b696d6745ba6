"""The memory of an engine, computed from a config.json, against what an engine allocates.

One rank is measured in `make test`, two ranks in `make nightly`.
"""

import memory_cases as cases
import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import engine_memory
from quadriga.engines.memory import Rows, TrainingUse
from quadriga.engines.micro_batches import plan_micro_batches
from rank_groups import fork_ranks

TOLERANCE = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("families")
    cases.write_models(path)
    return path


@pytest.fixture(scope="module")
def two_ranks(folder):
    fork_ranks(cases.measure_on_ranks, 2, str(folder), limit=170)
    # The file was written by `measure_on_two_ranks`; its keys are dataclasses, which need pickle.
    return torch.load(folder / "two_ranks.pt", weights_only=False)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("count", [17, 1000])
@pytest.mark.parametrize(("prompt", "response", "samples"), [(10, 240, 1), (100, 20, 8)])
def test_the_largest_micro_batch_is_planned_from_few_rows(
    prompt, response, samples, count, size, stages
):
    rows = Rows(count, prompt, response, samples, size)
    limits = {"size": size, "max_tokens": 4096, "share_prompts": True, "stages": stages}
    whole = plan_micro_batches(rows.batch(), **limits)
    few = plan_micro_batches(rows.for_micro_batches(4096).batch(), **limits)

    def tokens(micro_batch):
        groups = {row // samples for row in micro_batch.tolist()}
        return len(micro_batch) * response + len(groups) * prompt

    assert tokens(few[0]) >= 0.95 * max(map(tokens, whole))
    assert (len(few) > 1) == (len(whole) > 1)


def check(plan, found):
    assert plan.held["parameters"] + plan.held["buffers of the model"] == found.parameters
    assert plan.held["optimizer states"] == found.optimizer
    assert plan.peak("backward", "step") == pytest.approx(found.update, rel=TOLERANCE)
    assert plan.peak("step") == pytest.approx(found.step, rel=TOLERANCE)
    assert plan.peak("evaluate") == pytest.approx(found.evaluate, rel=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [*cases.CASES[::2], *(pytest.param(c, marks=pytest.mark.nightly) for c in cases.CASES[1::2])],
    ids=str,
)
def test_the_plan_is_what_one_rank_allocates(case, folder):
    check(cases.planned(case, folder, ranks=1), cases.measured(case, folder))


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*cases.CASES, *cases.DIVIDED], ids=str)
def test_the_plan_is_what_each_of_two_ranks_allocates(case, folder, two_ranks):
    check(cases.planned(case, folder, ranks=2), two_ranks[case])


def test_states_of_seven_billion_parameters(tmp_path):
    # Qwen2.5-7B: 28 layers, and 7.6e9 parameters in all. Only its config.json is read.
    from transformers import Qwen2Config

    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32768,
        tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    model = ModelConfig(path=str(tmp_path), gradient_checkpointing=True)
    rows = Rows(64, 512, 512, samples=8)
    plan = engine_memory(model, EngineConfig(), TrainingUse("lm", 8, "cuda", rows, None))
    weights = 7_615_616_512
    assert sum(plan.weights.values()) == weights
    assert plan.held["parameters"] == pytest.approx(4 * weights / 8, rel=1e-3)
    assert plan.held["optimizer states"] == pytest.approx(8 * weights / 8, rel=1e-3)
    # Reduced after each micro-batch, because whole gradients are above the limit.
    assert plan.adds["backward"]["gradients"] < 4 * weights
    # At most 16384 tokens of hidden size 3584 in bfloat16 are kept for each of 28 layers, and the
    # logits are computed in tiles.
    kept = 28 * 16384 * 3584 * 2
    assert kept < plan.adds["backward"]["activations"] < 3 * kept
