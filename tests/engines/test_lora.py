"""Adapters: what is trained, saved and exported, against PEFT and against the base model."""

import json
from dataclasses import replace

import engine_cases as cases
import pytest
import torch
from peft import LoraConfig as PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quadriga.checkpoint.shards import read_scalars
from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FROZEN, FSDPEngine
from quadriga.engines.loading import check_trained_part
from quadriga.errors import CheckpointError, ConfigError, ModelError
from quadriga.models.adapters import is_adapter
from quadriga.models.tiny import write_tiny_model

LORA = LoraConfig(rank=3, alpha=8.0)
SEED = 11
weights = cases.weights


def build(folder: str, lora: LoraConfig = LORA, *, dtype="float32", head="lm", **settings):
    """Build an engine that trains adapters; equal on every rank and in every process."""
    torch.manual_seed(SEED)
    freeze = settings.pop("freeze", ())
    optim = settings.pop("optim", OptimConfig(lr=0.01))
    return FSDPEngine(
        ModelConfig(path=folder, lora=lora, freeze=freeze),
        EngineConfig(dtype=dtype, **settings.pop("engine", {})), optim, head=head, total_steps=8,
        **settings,
    )  # fmt: skip


LAYERS = 2
SIZES = {  # (outputs, inputs) of the linear layers of one layer of the model in conftest.py
    "q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32),
    "gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48),
}  # fmt: skip
ELEMENTS = LAYERS * sum(3 * (out + inner) for out, inner in SIZES.values())


@pytest.fixture(scope="module")
def trained(model_folder):
    """An engine after two steps, so that B is not zero."""
    engine = build(model_folder)
    for _ in range(2):
        cases.step(engine)
    return engine


def log_probs(engine):
    return engine.forward(cases.make_batch())["log_probs"]


def adapters(engine):
    return {
        n: p.detach().full_tensor().clone()
        for n, p in engine.module.named_parameters()
        if is_adapter(n)
    }


def test_gradients_equal_those_of_peft(model_folder):
    engine = build(model_folder, dtype="float64", engine={"reduce_dtype": "float64"})
    for name, parameter in engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    config = PeftConfig(r=3, lora_alpha=8, target_modules=list(SIZES))
    naive = get_peft_model(base, config)
    own = dict(naive.named_parameters())
    for name, value in adapters(engine).items():
        own[f"base_model.model.{name}"].data = value.clone()
    batch, shares = cases.make_batch(), []
    tokens = batch["response_mask"].sum()
    for row in range(len(batch["input_ids"])):
        kept = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][kept]
        logits = naive(ids[None]).logits[0].log_softmax(-1)
        wanted = torch.zeros(batch["input_ids"].shape[1], dtype=torch.float64)
        wanted[cases.P :] = batch["weight"][row] * batch["response_mask"][row]
        taken = logits[:-1].gather(1, ids[1:, None])[:, 0]
        shares.append((taken * wanted[kept][1:]).sum() / tokens)
    torch.stack(shares).sum().backward()

    def loss(outputs, micro):
        return (outputs["log_probs"] * micro["weight"] * micro["response_mask"]).sum() / tokens, {}

    found, _ = cases.gradients(engine, batch, loss, 2)
    assert found.keys() == adapters(engine).keys()
    for name, gradient in found.items():
        expected = own[f"base_model.model.{name}"].grad
        assert expected.abs().max() > 0
        assert torch.allclose(gradient, expected, atol=1e-7), name


def test_only_adapters_are_trained_and_saved(model_folder, trained, tmp_path):
    base = build(model_folder, LoraConfig(rank=3, alpha=8.0))
    assert sum(p.numel() for p in base.module.parameters() if p.requires_grad) == ELEMENTS
    trained.save(tmp_path)
    stored = load_file(tmp_path / "shard_00000.safetensors")
    # A and B with two moments each, in float32, and nothing of the base model.
    assert sum(tensor.nbytes for tensor in stored.values()) == 3 * 4 * ELEMENTS
    snapshot = trained.copy_state(2, whole=True)
    assert snapshot.blocks.keys() == stored.keys()
    # Of a checkpoint alone: it can be loaded over other frozen weights.
    assert [FROZEN in it for it in (read_scalars(tmp_path), snapshot.extra["scalars"])] == [1, 0]
    moments = trained.optimizer.tensors()
    assert sum(tensor.numel() for tensor in moments.values()) == 2 * ELEMENTS
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, parameter in trained.module.named_parameters():
        if not is_adapter(name):
            own = before[name.replace(".base_layer", "")]
            assert torch.equal(parameter.detach().full_tensor(), own), name


def test_the_base_is_the_same_weights_with_adapters_off_to_the_bit(model_folder, trained):
    frozen = FSDPEngine(ModelConfig(path=model_folder), EngineConfig())
    base = trained.without_adapters()
    assert torch.equal(log_probs(base), log_probs(frozen))
    assert not torch.allclose(log_probs(trained), log_probs(frozen), atol=1e-4)
    assert base.module is trained.module
    for name, weight in weights(base).items():
        assert torch.equal(weight, weights(frozen)[name])
    with pytest.raises(ConfigError, match="no optimizer"):
        cases.step(base)
    with pytest.raises(ConfigError, match=r"no adapters, because model\.lora is not set"):
        frozen.without_adapters()


def test_merged_weights_have_the_names_of_the_base_and_its_function(
    model_folder, trained, tmp_path
):
    frozen = FSDPEngine(ModelConfig(path=model_folder), EngineConfig())
    own, base, parts = weights(trained), weights(frozen), adapters(trained)
    assert list(own) == list(base)
    for name, weight in own.items():
        expected, layer = base[name].double(), name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in parts:
            a, b = (parts[f"{layer}.lora_{part}.default.weight"].double() for part in "AB")
            expected = expected + 8 / 3 * b @ a
        assert torch.allclose(weight.double(), expected, atol=1e-6), name
    trained.save_hf(tmp_path / "model")
    merged = FSDPEngine(ModelConfig(path=str(tmp_path / "model")), EngineConfig())
    assert torch.allclose(log_probs(merged), log_probs(trained), atol=1e-5)
    with_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "model" / "adapter"
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = cases.make_batch()["input_ids"][2:3]
    assert torch.allclose(with_peft(ids).logits, whole(ids).logits, atol=1e-5)


def test_a_checkpoint_of_another_base_is_refused(folders, trained, tmp_path):
    trained.save(tmp_path)
    with pytest.raises(CheckpointError, match="its frozen weights were others than those of"):
        build(folders.reference).load(tmp_path)


def test_a_run_starts_from_an_adapter(model_folder, trained, tmp_path):
    trained.save_hf(tmp_path / "model")
    folder = str(tmp_path / "model" / "adapter")
    again = build(model_folder, LoraConfig(path=folder))
    assert torch.equal(log_probs(again), log_probs(trained))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=4, but the adapter in .* has 3"):
        build(model_folder, LoraConfig(path=folder, rank=4))


def test_an_adapter_of_another_base_is_refused_with_the_sizes(model_folder, trained, tmp_path):
    trained.save_hf(tmp_path / "model")
    folder = tmp_path / "model" / "adapter"
    shape = replace(cases.MODEL_SHAPE, hidden_size=64)
    write_tiny_model(tmp_path / "wide", ["one two three"], shape)
    message = (
        r"layers\.0\.mlp\.down_proj has 48 inputs and 64 outputs in the model, so with rank 3 "
        r"its lora_B must be \[64, 3\], and the adapter has \[32, 3\]"
    )
    with pytest.raises(ModelError, match=message):
        build(str(tmp_path / "wide"), LoraConfig(path=str(folder)))
    write_tiny_model(
        tmp_path / "short", ["one two three"], replace(cases.MODEL_SHAPE, num_layers=1)
    )
    with pytest.raises(ModelError, match=r"the model has no linear layer 'model\.layers\.1"):
        build(str(tmp_path / "short"), LoraConfig(path=str(folder)))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ModelError, match=r"has use_dora=True .* which is not supported"):
        build(model_folder, LoraConfig(path=str(folder)))
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        build(model_folder, LoraConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"target_modules": ("q_proj", "v_proj")}, {"q_proj", "v_proj"}),
        ({"exclude_modules": ("down_proj",)}, set(SIZES) - {"down_proj"}),
        ({"target_modules": ("q_proj", "all-linear")}, set(SIZES)),
        ({"target_modules": ("layers.1.self_attn.k_proj",)}, {"k_proj"}),
    ],
)
def test_which_layers_have_adapters(model_folder, lora, expected):
    names = adapters(build(model_folder, replace(LORA, **lora)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == expected


def test_dropout_is_on_in_updates_only(model_folder):
    engine = build(model_folder, replace(LORA, dropout=0.5))
    assert not any(module.training for module in engine.module.modules())  # before any update
    cases.step(engine)
    assert torch.equal(log_probs(engine), log_probs(engine))
    batch, outputs = cases.make_batch(), []

    def loss(found, micro):
        outputs.append(found["log_probs"].detach())
        return found["log_probs"].sum() * 0.0, {}

    for _ in range(2):
        engine.train_step(batch, loss)
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(log_probs(engine), log_probs(engine))


def test_a_value_model_with_adapters_trains_its_head(model_folder):
    engine = build(model_folder, head="value")
    trained_names = {n for n, p in engine.module.named_parameters() if p.requires_grad}
    assert {"score.weight", "score.bias"} <= trained_names
    assert all(is_adapter(name) or name.startswith("score.") for name in trained_names)


def test_weights_that_match_a_pattern_are_frozen(model_folder, tmp_path):
    engine = build(model_folder, LoraConfig(), freeze=("model.embed_tokens.*", "model.layers.0.*"))
    before = weights(engine)
    cases.step(engine)
    after = weights(engine)
    for name, weight in after.items():
        frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert torch.equal(weight, before[name]) == frozen, name
    engine.save(tmp_path)
    stored = load_file(tmp_path / "shard_00000.safetensors")
    assert not any("layers.0." in name for name in stored)
    again = build(model_folder, LoraConfig(), freeze=("model.embed_tokens.*", "model.layers.0.*"))
    again.load(tmp_path)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(again).items())


def test_a_head_that_is_new_cannot_be_frozen(model_folder):
    frozen = ("score*",)
    with pytest.raises(ConfigError, match=r"matches score\..*, which the folder .* does not have"):
        check_trained_part(ModelConfig(path=model_folder, freeze=frozen), "value")
    check_trained_part(ModelConfig(path=model_folder, freeze=("model.embed_tokens.*",)), "value")


def test_a_checkpoint_with_weights_that_are_frozen_now_is_refused(model_folder, trained, tmp_path):
    whole = build(model_folder, LoraConfig())
    cases.step(whole)
    whole.save(tmp_path / "whole")
    frozen = build(model_folder, LoraConfig(), freeze=("model.embed_tokens.*",))
    with pytest.raises(CheckpointError, match=r"trained values of 'model\.embed_tokens\.weight'"):
        frozen.load(tmp_path / "whole")
    trained.save(tmp_path / "adapters")
    fewer = build(model_folder, replace(LORA, exclude_modules=("q_proj",)))
    message = (
        r"trained values of '.*layers\.0.*q_proj.*' and 3 other weights, which this model does"
    )
    with pytest.raises(CheckpointError, match=message):
        fewer.load(tmp_path / "adapters")
