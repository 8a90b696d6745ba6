"""The cost of a model's sequences, from its config."""

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig

from quadriga.engines.sequence_cost import model_shape, sequence_cost
from quadriga.models.architectures import ARCHITECTURES
from quadriga.models.loading import load_causal_lm


def llama(**more: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=100, **more,
    )  # fmt: skip


def test_the_sizes_of_a_llama_model() -> None:
    shape = model_shape(llama())
    assert (shape.hidden_size, shape.attention_size, shape.key_value_size) == (32, 32, 16)
    assert (shape.mlp_size, shape.vocabulary, shape.windows) == (48, 100, (None, None))
    assert model_shape(llama(head_dim=16)).attention_size == 64


def test_the_linear_cost_is_that_of_the_weights_of_the_layers(model_folder) -> None:
    """A matrix costs two FLOPs per entry and token. Norms and the embedding are left out."""
    model = load_causal_lm(model_folder)
    entries = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if ".layers." in name and weight.ndim == 2
    )
    cost = sequence_cost(model.config, "lm", "cpu")
    assert cost.token == 2 * entries
    assert cost.output == 2 * model.lm_head.weight.numel()
    assert sequence_cost(model.config, "value", "cpu").output == 2 * model.config.hidden_size


KINDS = {
    "inkling_text": (
        {
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding"],
            "sliding_window_size": 6, "num_hidden_layers": 3,
        },
        (None, 6, 6),
    ),
    "lfm3": (
        {
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "sliding_window": 5, "num_hidden_layers": 3,
        },
        (0, None, 5),
    ),
    "bamba": ({"num_hidden_layers": 3, "attn_layer_indices": [1]}, (0, None, 0)),
    "nemotron_h": (
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        (0, 0, None, 0),
    ),
    "gpt_neo": (
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        (None, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_several_kinds_have_their_windows(name) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    settings, windows = KINDS[name]
    assert model_shape(CONFIG_MAPPING[name](**settings)).windows == windows


def test_sdpa_on_accelerators_computes_the_attention_of_a_shared_prompt_in_each_row() -> None:
    assert sequence_cost(llama(), "lm", "cpu").prompt_attention_once
    assert sequence_cost(llama(), "lm", "cuda").prompt_attention_once
    assert not sequence_cost(llama(), "lm", "cuda", "sdpa").prompt_attention_once
    assert not sequence_cost(llama(), "lm", "npu").prompt_attention_once


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_has_a_cost(name: str) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    shape = model_shape(CONFIG_MAPPING[name]())
    sizes = (shape.hidden_size, shape.attention_size, shape.key_value_size, shape.mlp_size)
    assert min(sizes) > 0 and shape.vocabulary > 1
    assert shape.windows and all(window is None or window >= 0 for window in shape.windows)
