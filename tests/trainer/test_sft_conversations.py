"""Supervised fine-tuning on conversations: loss on the tokens of the assistant only."""

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from fine_tuning_cases import six_steps
from transformers import AutoModelForCausalLM, GenerationConfig

from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import ModelConfig
from quadriga.data.conversations import SFTDataset
from quadriga.errors import DataError
from quadriga.models import load_tokenizer
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import SFTTrainer, run_sft
from quadriga.workers.actor_rollout_ref import special_tokens


def turns(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Tom has {number % 5} apples."},
        {"role": "assistant", "content": f"#### {number % 5}"},
        {"role": "user", "content": "He buys 1 more."},
        {"role": "assistant", "content": f"#### {number % 5 + 1}"},
    ][: 2 if number % 3 == 0 else 4]


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    for name, numbers in (("train", range(24)), ("val", range(30, 37))):
        rows = [json.dumps({"messages": turns(number)}) for number in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "train.jsonl", tmp_path / "val.jsonl"


@pytest.fixture
def settings(tiny_task, files, tmp_path) -> list[str]:
    train, val = files
    return six_steps("sft", tiny_task, tmp_path).given(
        "run", f"data.train_files=[{train}]", f"data.val_files=[{val}]",
        "data.messages_key=messages", "data.train_batch_size=8", "data.shuffle=false",
        "trainer.total_training_steps=3", "trainer.test_freq=1",
    )  # fmt: skip


def naive_loss(model, data: SFTDataset, rows) -> torch.Tensor:
    """The mean over the tokens of the assistant, row by row without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        item = data[row]
        ids = torch.tensor([[*item["prompt_ids"], *item["response_ids"]]])
        mask = torch.tensor([0] * len(item["prompt_ids"]) + item["response_mask"])
        log_probs = model(ids).logits[0].double().log_softmax(-1)
        chosen = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        total = total - (chosen * mask[1:]).sum()
        count += int(mask.sum())
    return total / count


def test_loss_and_gradient_are_those_of_the_assistants_tokens(settings, files, tiny_task, tmp_path):
    run_sft(load_config(SFTConfig, settings))
    metrics = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    tokenizer = load_tokenizer(str(tiny_task.model))
    train, val = (SFTDataset([f], tokenizer, messages_key="messages") for f in files)
    model = AutoModelForCausalLM.from_pretrained(tiny_task.model, dtype=torch.float32)
    loss = naive_loss(model, train, range(8))
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    steps = [row for row in metrics if "sft/loss" in row]
    assert steps[0]["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert steps[0]["sft/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype=torch.float32)
    last = naive_loss(trained, val, range(7)).item()
    assert steps[-1]["val/loss"] == pytest.approx(last, rel=1e-5)
    assert steps[-1]["val/loss"] < steps[0]["val/loss"]


@pytest.mark.parametrize("prompts", [False, True])
def test_a_run_without_prompts_holds_no_rollout(settings, tiny_task, tmp_path, prompts):
    """A second copy of the weights would be loaded, and sent at each validation, for nothing."""
    if prompts:
        settings += ["data.messages_key=null", f"data.train_files={tiny_task.data('sft')}",
                     f"data.val_files={tiny_task.data('test')}"]  # fmt: skip
    held = []
    with closing(SFTTrainer(load_config(SFTConfig, settings))) as trainer:
        policy = trainer.init_workers().policy
        policy.execute_with_func_generator(lambda worker: held.append(worker.rollout is not None))
        trainer.fit()
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert held == [prompts]
    for metric in ("time/sync_weights", "val/accuracy"):
        assert any(metric in row for row in rows) is prompts, metric


def test_validation_rows_need_answers(settings, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": turns(1)[:1]}) + "\n")
    given = [*settings, f"data.val_files=[{prompts}]"]
    with pytest.raises(DataError, match="no message of the role 'assistant'"):
        run_sft(load_config(SFTConfig, given))


@pytest.fixture
def other_ends(tiny_task, tmp_path) -> Path:
    """A model whose chat template ends turns with another token than its tokenizer."""
    folder = shutil.copytree(tiny_task.model, tmp_path / "gemma")
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + m.content + '<|user|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_a_response_ends_as_a_turn_of_the_template(settings, other_ends, tmp_path):
    """In generation, and with the tokens that the trained model names."""
    tokenizer = load_tokenizer(str(other_ends))
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")]
    assert special_tokens(ModelConfig(path=str(other_ends)))[1] == tuple(sorted(ends))
    more = [f"model.path={other_ends}", "trainer.total_training_steps=1", "data.val_files=[]"]
    result = run_sft(load_config(SFTConfig, [*settings, *more, "trainer.test_freq=0"]))
    written = GenerationConfig.from_pretrained(result.model_path)
    assert sorted(written.eos_token_id) == sorted(ends)


def test_another_end_token_is_told(tiny_task, caplog):
    from quadriga.trainer.fine_tuning import tell_other_ends

    tokenizer = load_tokenizer(str(tiny_task.model))
    own, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")
    tell_other_ends(str(tiny_task.model), tokenizer, [own])
    assert not caplog.records
    tell_other_ends(str(tiny_task.model), tokenizer, [own, other])
    assert "a turn of the assistant with '<|user|>', which does not end" in caplog.text
    assert f"add its id ({other}) to trainer.val_sampling.stop_token_ids" in caplog.text
