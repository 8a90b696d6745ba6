"""Parameters under the names of a model's files: what `save_pretrained` writes, part by part."""

import pytest
import torch
from document import COMPUTED, DIVIDED, RENAMED
from safetensors.torch import load_file
from small_models import small_model

from quadriga.errors import ModelError
from quadriga.models.architectures import ARCHITECTURES
from quadriga.models.weights import file_parts

MIXTURES = (
    "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "phimoe", "qwen3_moe", "qwen3_next",
)  # fmt: skip
CASES = [
    pytest.param(name, marks=() if name in (*MIXTURES, *COMPUTED) else pytest.mark.nightly)
    for name in ARCHITECTURES
]


@pytest.mark.parametrize("model_type", CASES)
def test_parts_of_parameters_are_the_tensors_of_the_files(model_type, tmp_path):
    model = small_model(model_type)
    if model_type in COMPUTED:
        with pytest.raises(ModelError, match=r"transformers computes .* use .*rollout.name=hf"):
            file_parts(model)
        return
    parts, state = file_parts(model), model.state_dict()
    assert parts.keys() == state.keys()
    renamed = {name for name, own in parts.items() if [part.name for part in own] != [name]}
    divided = {name for name in renamed if len(parts[name]) > 1}
    assert ("divided" if divided else "renamed" if renamed else "equal") == (
        "divided" if model_type in DIVIDED else "renamed" if model_type in RENAMED else "equal"
    )
    model.save_pretrained(tmp_path, max_shard_size="1GB")
    written = load_file(tmp_path / "model.safetensors")
    found = {
        part.name: state[name][tuple(slice(*span) for span in part.box)].reshape(part.shape)
        for name, own in parts.items()
        for part in own
    }
    assert written.keys() <= found.keys()  # a tied weight is written under one of its names
    for name, tensor in written.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    left = found.keys() - written.keys()
    assert all(any(found[name].equal(tensor) for tensor in written.values()) for name in left)
