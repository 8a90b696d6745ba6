"""Every architecture can have a scalar head, also where transformers has no token classifier."""

import naive_loop
import pytest
import torch
from small_models import VOCABULARY, each, small_model

from quadriga.config.schema import ModelConfig
from quadriga.engines.base import VALUES
from quadriga.engines.loading import empty_model, load_model
from quadriga.engines.token_model import TokenModel
from quadriga.errors import ModelError
from quadriga.models.architectures import ARCHITECTURES

torch.set_num_threads(1)
CPU = torch.device("cpu")
REFUSED = dict.fromkeys(
    ("bailing_hybrid", "hy_v4", "inkling2_text", "llama4", "llama4_text"), "tensors of the backbone"
) | {"falcon_h1": "cannot have a head"}
"""Architectures without a scalar head -> a word of the error."""
EACH_KIND = ("gemma3_text", "gpt2", "granite", "llama", "mamba", "mixtral", "olmo2", "qwen2")
"""With a token classifier of transformers, with one of another form, and without one."""


@pytest.fixture(scope="module")
def batch():
    return naive_loop.make_batch(VOCABULARY)


@pytest.mark.parametrize(
    "model_type", each([name for name in ARCHITECTURES if name not in REFUSED], EACH_KIND)
)
def test_values_are_those_of_a_head_on_the_hidden_states(model_type, batch, tmp_path):
    model = small_model(model_type)
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    values = load_model(config, "value", torch.float32, trained=True)
    torch.manual_seed(1)
    with torch.no_grad():
        assert not any(parameter.any() for parameter in values.score.parameters())
        values.score.weight.normal_()
        values.score.bias.fill_(0.5)
    hidden = naive_loop.hidden_states(model, batch)
    expected = (hidden @ values.score.weight[0] + 0.5) * batch["response_mask"]
    rows = ARCHITECTURES[model_type].rows
    for packed in [False, True] if rows == "packed" else [False]:
        found = TokenModel(values, "value", CPU, packed=packed)(
            batch, temperature=1.0, entropy=False
        )[VALUES]
        found = found * batch["response_mask"]
        assert torch.allclose(found, expected, atol=1e-3), f"packed={packed}"
    names = {
        name
        for name, _ in empty_model(config, "value", torch.float32, trained=True).named_parameters()
    }
    assert names == {name for name, _ in values.named_parameters()}


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_without_a_head_is_refused_by_name(model_type, tmp_path):
    small_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=REFUSED[model_type]):
        load_model(ModelConfig(path=str(tmp_path)), "value", torch.float32, trained=True)
