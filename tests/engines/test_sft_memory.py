"""The memory plan of `quadriga sft` against what an engine allocates for the rows of its data."""

import memory_cases as cases
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.data.conversations import ConversationLengths
from quadriga.engines.fsdp import FSDPEngine
from quadriga.protocol import fields
from quadriga.trainer.checks.memory import sft_plan
from row_cases import rows_of

VOCABULARY = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose logits are the largest of its activations."""
    folder = tmp_path_factory.mktemp("logits")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def settings(model, *more) -> SFTConfig:
    given = (f"model.path={model}", "engine.fused_head=false", "data.train_batch_size=4")
    return load_config(SFTConfig, [*given, *more])


def batch(rows):
    """Return rows of (prompt, response) tokens as a batch, left-padded prompts before responses."""
    made = rows_of([(0, prompt, response) for prompt, response in rows])
    ids = made[fields.INPUT_IDS]
    return made | {fields.INPUT_IDS: torch.randint(VOCABULARY, ids.shape)}


def lengths(rows) -> ConversationLengths:
    return ConversationLengths(
        rows=len(rows),
        longest=max(map(sum, rows)),
        targets=max(response for _, response in rows),
        share=max(response / (prompt + response) for prompt, response in rows),
    )


def engine_of(config) -> FSDPEngine:
    return FSDPEngine(config.model, config.engine, config.optim, total_steps=9)


def peaks(config, train, evaluated=None):
    """Return (planned, measured) bytes of an update, and of the pass of the validation loss."""
    own = None if evaluated is None else lengths(evaluated)
    (pool,) = sft_plan(config, "cpu", lengths(train), None, own).pools
    plan, engine = pool.engines["actor"], engine_of(config)
    size = config.data.micro_batch_size_per_gpu

    def update():
        engine.train_step(
            batch(train), lambda out, _: (out["log_probs"].sum(), {}), micro_batch_size=size
        )

    update()  # the moments exist after the first step
    found = [(plan.peak("backward", "step"), cases.least_peak_of(update))]
    if evaluated is not None:
        rows, most = batch(evaluated), config.engine.forward_rows(size)

        def evaluate():
            engine.forward(rows, micro_batch_size=most)

        found.append((plan.peak("evaluate"), cases.least_peak_of(evaluate)))
    return found


def test_the_plan_has_the_most_targets_of_a_row_that_is_not_the_longest(model):
    # The longest row has 20 targets, the others 190.
    rows = [(190, 20), *[(10, 190)] * 3]
    ((planned, measured),) = peaks(settings(model), rows)
    assert 0.95 * measured <= planned <= 1.5 * measured
    equal = [(10, 190)] * 4
    ((planned, measured),) = peaks(settings(model), equal)
    assert planned == pytest.approx(measured, rel=0.15)


def test_short_rows_fill_a_budget_of_tokens_with_targets(model):
    # 400 tokens: two rows of 200 tokens with 100 targets each, or 19 short rows with 20 targets.
    budget = ("engine.max_tokens_per_micro_batch=400", "data.train_batch_size=40")
    rows = [(100, 100), *[(1, 20)] * 39]
    ((planned, measured),) = peaks(settings(model, *budget), rows)
    assert 0.95 * measured <= planned <= 1.5 * measured


def test_the_pass_of_the_validation_loss_is_planned(model):
    one = ("data.micro_batch_size_per_gpu=1",)
    rows = [(10, 190)] * 4
    (update, evaluation) = peaks(settings(model, *one), rows, rows)
    for planned, measured in (update, evaluation):
        assert planned == pytest.approx(measured, rel=0.15)
    assert evaluation[1] > 1.3 * update[1]
