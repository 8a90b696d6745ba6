"""Architectures in no table: computed in the form that is right for every causal model, or refused.

The tests take an architecture out of the tables.
"""

import naive_loop
import pytest
import torch
from small_models import VOCABULARY, small_model
from test_architectures import check_generation, check_training

from quadriga.config.schema import ModelConfig
from quadriga.errors import ModelError
from quadriga.models import architectures
from quadriga.rollout import build_rollout

torch.set_num_threads(1)


@pytest.fixture
def unlisted(monkeypatch, tmp_path):
    """A function that writes a small model of an architecture that is in no table any more."""

    def write(model_type, changes=None):
        monkeypatch.delitem(architectures.ARCHITECTURES, model_type, raising=False)
        monkeypatch.delitem(architectures._REASONS, model_type, raising=False)
        model = small_model(model_type, changes)
        model.save_pretrained(tmp_path)
        return model, str(tmp_path)

    return write


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "bloom", "jamba"])
def test_causal_model_equals_the_naive_loop(unlisted, model_type):
    model, folder = unlisted(model_type)
    batch = naive_loop.make_batch(VOCABULARY)
    check_generation(model, check_training(model, "padded", folder, batch), folder, batch)


REFUSED = [
    ("roberta", {"is_decoder": False}, "its tokens attend to later tokens"),
    ("bert", {"is_decoder": False}, "its tokens attend to later tokens"),
    ("minimax", {}, "it cannot generate with a cache: MiniMax uses cache of its own"),
    ("rwkv", {}, "it generates other numbers with a cache"),
    ("openai-gpt", {}, "it generates other numbers with a cache"),
    ("recurrent_gemma", {"block_types": ["recurrent", "attention"]}, "with a cache"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_other_models_are_refused_when_they_are_loaded(unlisted, model_type, changes, message):
    _, folder = unlisted(model_type, changes)
    with pytest.raises(ModelError, match=message) as caught:
        build_rollout("hf", ModelConfig(path=folder))
    assert f"model_type {model_type!r}" in str(caught.value)
