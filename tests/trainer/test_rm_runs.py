"""`quadriga rm`: gradients, several ranks, resume, export, and data that does not fit."""

from pathlib import Path

import pytest
import torch
from fine_tuning_cases import pair_rows, six_steps
from run_cases import noted, timeless
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from quadriga.algorithms.value_loss import pairwise_loss
from quadriga.config.commands import RMConfig
from quadriga.config.loading import load_config
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import run_rm


@pytest.fixture
def settings(tiny_task, tmp_path):
    """settings("a=b", …) returns the settings of a run of three steps of 8 pairs."""
    runs = six_steps("rm", tiny_task, tmp_path)

    def make(*more):
        steps = ("trainer.total_training_steps=3", "data.train_batch_size=8", "optim.lr=1e-2")
        return load_config(RMConfig, runs.given("run", *steps, *more))

    return make


def metrics(config):
    folder = Path(config.trainer.default_local_dir)
    return timeless(list(read_jsonl(folder / "metrics.jsonl")))


def test_the_loss_by_hand_and_its_derivative():
    chosen = torch.tensor([2.0, 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    found = pairwise_loss(chosen, rejected, torch.tensor([0.5, 0.0], dtype=torch.float64))
    # −log σ(0.5) and −log σ(−3)
    assert found.loss_P.tolist() == pytest.approx([0.4740769842, 3.0485873515])
    found.loss_P.sum().backward()
    assert torch.allclose(chosen.grad, -found.slope_P)
    assert torch.allclose(rejected.grad, found.slope_P)


@pytest.mark.parametrize(
    "more, passes",
    [
        ([], 0),
        (["data.micro_batch_size_per_gpu=2"], 0),  # a pair each
        (["data.micro_batch_size_per_gpu=1"], 1),  # the responses of a pair are apart
        (["model.lora.rank=2"], 0),
        # The loss is that of scores without dropout, which the update does not compute.
        (["model.lora.rank=2", "model.lora.dropout=0.1"], 1),
    ],
    ids=str,
)
def test_the_scores_have_a_pass_of_their_own_only_where_pairs_need_it(
    settings, monkeypatch, more, passes
):
    made = []
    record = lambda engine, batch, **given: made.append(len(batch["input_ids"]))  # noqa: E731
    noted(monkeypatch, FSDPEngine, "forward", record)
    config = settings("data.val_files=[]", "trainer.total_training_steps=1", *more)
    run_rm(config)
    assert made == [16] * passes
    for row in metrics(config):
        assert {"rm/loss", "rm/accuracy", "rm/difference"} <= row.keys()
        assert 0 <= row["rm/accuracy"] <= 1


@pytest.mark.parametrize("micro", ["null", "1", "3"])
def test_a_step_equals_one_of_a_plain_loop(settings, tiny_task, micro):
    config = settings(
        "trainer.total_training_steps=2", "optim.weight_decay=0", "optim.grad_clip=1e9",
        "data.shuffle=false", "data.margin_key=margin", f"data.micro_batch_size_per_gpu={micro}",
    )  # fmt: skip
    result = run_rm(config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_task.model, num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    torch.nn.init.zeros_(model.score.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    pairs = pair_rows(16)

    def score(row, key):
        answer = row[key] if isinstance(row[key], str) else row[key][-1]["content"]
        chat = [*row["prompt"], {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
        return model(torch.tensor([ids])).logits[0, 0]

    losses = []
    for step in range(2):
        of_step = []
        for row in pairs[8 * step : 8 * step + 8]:
            difference = score(row, "chosen") - score(row, "rejected") - row["margin"]
            of_step.append(-torch.nn.functional.logsigmoid(difference))
        loss = torch.stack(of_step).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = metrics(config)
    assert [row["rm/loss"] for row in found] == pytest.approx(losses, rel=1e-4)
    exported = AutoModelForSequenceClassification.from_pretrained(result.model_path)
    assert type(exported).__name__ == "LlamaForSequenceClassification"
    assert exported.config.pad_token_id == tokenizer.pad_token_id
    assert exported.score.weight.shape == (1, 32)
    assert torch.allclose(exported.score.weight, model.score.weight, atol=2e-3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("trainer.n_gpus_per_node=3", "=8 rows do not divide over 3 ranks"),
        ("trainer.n_gpus_per_node=2", "give the role one rank"),
        ("engine.fused_head=true", "computes one number a sequence"),
        ("engine.max_tokens_per_micro_batch=8", r"is below the longest sequence: .* one is added"),
        ("model.freeze=[nothing]", r"model\.freeze: no weight"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, more, message):
    with pytest.raises(ConfigError, match=message):
        run_rm(settings(more))
