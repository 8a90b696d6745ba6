"""Prompts and responses that do not fit the context window are refused, with the arithmetic."""

import pytest
from transformers import AutoConfig

from quadriga.errors import ModelError
from quadriga.models import check_context_window
from quadriga.models.limits import LongestSequence, context_window


def rope(kind, **settings):
    return {"rope_type": kind, "rope_theta": 1e4, **settings}


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
PHI3 = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 200,
    "original_max_position_embeddings": 48,
    "rope_parameters": rope("longrope", original_max_position_embeddings=48, **LONG),
}
DYNAMIC = rope("dynamic", factor=2.0)
CASES = [
    ("gpt2", {"n_positions": 64}, 64),
    ("llama", {"max_position_embeddings": 128}, 128),
    ("mpt", {"max_seq_len": 32}, 32),
    ("bloom", {}, None),
    ("mamba", {}, None),
    ("falcon", {"alibi": True}, None),
    ("falcon", {"alibi": False, "max_position_embeddings": 96}, 96),
    # The window before stretching: 128 = 32 · 4. The window after it.
    ("qwen2", {"max_position_embeddings": 32, "rope_parameters": YARN}, 128),
    ("qwen2", {"max_position_embeddings": 128, "rope_parameters": YARN}, 128),
    # One row above 48 tokens would change the frequencies of all rows.
    ("phi3", PHI3, 48),
    ("llama", {"max_position_embeddings": 100, "rope_parameters": DYNAMIC}, 100),
    ("doge", {"keep_window_size": 40, "max_position_embeddings": 64}, 40),
]


@pytest.mark.parametrize(("model_type", "settings", "tokens"), CASES)
def test_window_of_a_config(model_type, settings, tokens):
    window = context_window(AutoConfig.for_model(model_type, **settings))
    assert (window and window.tokens) == tokens


def test_message_does_the_arithmetic(tmp_path):
    AutoConfig.for_model("gpt2", n_positions=64).save_pretrained(tmp_path)
    check_context_window(tmp_path, LongestSequence(64, "", ""))
    with pytest.raises(ModelError) as caught:
        check_context_window(tmp_path, LongestSequence(70, "50 + 20 is 70 tokens", "lower both"))
    message = str(caught.value)
    assert message.startswith("50 + 20 is 70 tokens, but the model in ")
    assert "at most 64 (max_position_embeddings in its config.json)" in message
    assert message.endswith("; lower both by 6")
