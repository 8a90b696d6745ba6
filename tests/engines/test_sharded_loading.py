"""Loading by shards on 2 and 3 ranks: numbers, bytes, memory, errors on all ranks together."""

import logging
import re

import loading_cases as cases
import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, Qwen3MoeConfig, ZambaConfig

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import fsdp
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.sharding import decoder_layers
from quadriga.errors import ModelError
from quadriga.parallel import distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("loading")
    cases.write_folders(path)
    return path


@pytest.fixture(
    scope="module", params=[3, pytest.param(2, marks=pytest.mark.nightly)], ids="{} ranks".format
)
def found(request, root):
    return cases.run(root, request.param)


@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_shards_and_steps_equal_those_of_the_whole_model(case, found):
    assert [rank["compared"][case] for rank in found] == [(True, True)] * len(found)


def test_each_rank_reads_its_own_rows_and_the_headers(found, root):
    stored = sum(file.stat().st_size for file in (root / "files").glob("*.safetensors"))
    for rank in found:
        own = 2 * rank["own elements"]  # bfloat16
        assert own < 1.05 * stored / len(found)
        assert own <= rank["bytes read"] < own + 0.1 * stored


def test_a_weight_that_is_not_finite_is_named_on_all_ranks_as_with_the_whole_model(found):
    errors = {rank["errors"]["not finite"] for rank in found}
    assert errors == {rank["errors"]["not finite, whole"] for rank in found}
    (error,) = errors
    assert "lm_head.weight has 3 NaN and 0 infinite" in error or "norm.weight has 0 NaN" in error
    assert "1 other tensors" in error


@pytest.mark.parametrize(
    ("damage", "text"),
    [("disk", "cannot be loaded: .*Input/output error"), ("absent", "absent does not exist")],
)
def test_an_error_on_one_rank_is_raised_on_all_ranks(found, damage, text):
    for number, rank in enumerate(found):
        begin = "" if number == 1 else "rank 1 cannot load the model: "
        assert re.match(f"{begin}(the )?model .*{text}", rank["errors"][damage]), rank["errors"][
            damage
        ]


def test_a_parameter_of_all_experts_is_read_from_the_tensors_of_each(tmp_path, caplog):
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, num_attention_heads=4, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="quadriga"):
        engine = FSDPEngine(ModelConfig(path=str(tmp_path)), EngineConfig())
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.state_stream())
    assert not caplog.records  # the model was not loaded whole


def test_a_device_without_memory_for_a_whole_unit_is_an_error_of_all_ranks(root, monkeypatch):
    agreed = []

    def failing(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(distributed, "gather_over_ranks", lambda x, **_: agreed.append(x) or [x])
    monkeypatch.setattr(fsdp, "shard_model", failing)
    with cases.whole_models(), pytest.raises(ModelError, match="cannot be loaded: out of memory"):
        FSDPEngine(ModelConfig(path=str(root / "untied")), EngineConfig())
    assert isinstance(agreed[-1], ModelError)


def test_layers_that_are_nested_or_share_parameters_are_no_units():
    mamba = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=16, num_hidden_layers=2))
    assert [type(layer).__name__ for layer in decoder_layers(mamba)] == ["MambaBlock"] * 2
    zamba = AutoModelForCausalLM.from_config(
        ZambaConfig(
            hidden_size=16, attention_hidden_size=32, intermediate_size=16, num_hidden_layers=6,
            num_attention_heads=2, num_key_value_heads=2, attention_head_dim=16, n_mamba_heads=2,
            attn_layer_period=2, attn_layer_offset=0, vocab_size=64,
        )
    )  # fmt: skip
    shared = [x for x in zamba.model.layers if type(x).__name__ == "ZambaHybridLayer"]
    assert len(shared) > 1
    assert decoder_layers(zamba) == [x for x in zamba.model.layers if x not in shared]
