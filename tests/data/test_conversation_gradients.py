"""Loss and gradient of a conversation are those of the assistant's tokens, for the chat formats of
several families. The tokens are listed by hand, without the chat template."""

import json

import pytest
import torch
from chat_families import CASES, CHAT, family
from transformers import AutoModelForCausalLM

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.data.conversations import SFTDataset
from quadriga.data.loader import SFTLoader
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.protocol import fields
from quadriga.workers.method_fields import UPDATE_SFT
from quadriga.workers.updates import BatchCounts, SupervisedObjective


def by_hand(user: str, assistant: str, end: str, rest: str, first: str = ""):
    """(text, whether the assistant wrote it) for CHAT; `rest` is between two turns."""
    return [
        (f"{first}{user}How many?{end}{rest}{assistant}", 0),
        (f"Three.{end}", 1),
        (f"{rest}{user}And one more?{end}{rest}{assistant}", 0),
        (f"Four.{end}", 1),
    ]


CHATML = ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>", "\n")
HEADER = "<|header|>{}<|end_header|>\n\n"
LLAMA3 = (HEADER.format("user"), HEADER.format("assistant"), "<|eot|>", "", "<|begin|>")
BY_HAND = {"ChatML": by_hand(*CHATML), "Llama 3": by_hand(*LLAMA3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients") / "model"
    shape = TinyModel(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
                      intermediate_size=48)  # fmt: skip
    # Its vocabulary is larger than those of the families.
    words = "How many? And one more? Three. Four. Be kind. Seven apples, eight pears, nine plums."
    write_tiny_model(folder, [words] * 4, shape)
    return str(folder)


def naive(folder: str, tokens: list[int], trained: list[int]):
    """Return loss and gradients of −log p, token by token, of those that are trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([tokens])).logits[0]
    logits.retain_grad()
    chosen = [
        -logits[position - 1].log_softmax(-1)[tokens[position]]
        for position, mark in enumerate(trained)
        if mark
    ]
    loss = torch.stack(chosen).mean()
    loss.backward()
    read = [position - 1 for position, mark in enumerate(trained) if mark]
    assert logits.grad.abs().sum(-1).nonzero().flatten().tolist() == read
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", BY_HAND)
def test_loss_and_gradients_are_those_of_the_tokens_of_the_assistant(name, folder, tmp_path):
    template, special, _ = CASES[name]
    tokenizer = family(template, special)
    size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    tokens, trained = [], []
    for text, mark in BY_HAND[name]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += ids
        trained += [mark] * len(ids)
    assert max(tokens) < size
    loss, expected = naive(folder, tokens, trained)

    file = tmp_path / "c.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n")
    [batch] = SFTLoader(SFTDataset([file], tokenizer, messages_key="messages"), 1)
    engine = FSDPEngine(ModelConfig(path=folder), EngineConfig(), OptimConfig())
    engine.optimizer.step = lambda: (0.0, 0.0)  # the gradients stay
    rows = {key: batch.batch[key] for key in UPDATE_SFT.reads}
    objective = SupervisedObjective(counts=BatchCounts.of(rows[fields.RESPONSE_MASK], engine))
    metrics = engine.train_step(rows, objective)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    for parameter, value in engine.module.named_parameters():
        found = value.grad.full_tensor()
        assert torch.allclose(found, expected[parameter], atol=1e-6), parameter
