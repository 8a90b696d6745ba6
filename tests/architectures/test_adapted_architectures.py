"""Adapters on the default layers of every architecture: the naive loop on merged weights."""

import naive_loop
import pytest
import torch
from small_models import VOCABULARY, each, small_model

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.loading import check_trained_part, whole_load_reason
from quadriga.errors import ConfigError
from quadriga.models.architectures import ARCHITECTURES

torch.set_num_threads(1)
REFUSED = dict.fromkeys(("gpt2", "gpt-sw3"), "its layers are Conv1D") | dict.fromkeys(
    ("zamba", "zamba2"), "are one weight"
)
"""Architectures that have no default -> a word of the error."""
EACH_KIND = ("deepseek_v3", "falcon", "jamba", "llama", "mamba2", "phimoe", "qwen3_next")
"""Experts in one tensor beside linear layers, layers that compute something else, recurrences."""
CONVERTED = ("bailing_hybrid", "hrm_text", "inkling2_text", "kimi_linear", "olmo_hybrid")
"""Architectures with parameters that transformers computes, other than those of experts."""
UNTRAINED = ("vision", "audio", ".indexer.")
"""Parts of names of layers without a gradient: there are no images or sounds, and an indexer
only chooses tokens."""


@pytest.fixture(scope="module")
def batch():
    return naive_loop.make_batch(VOCABULARY)


def build(folder, **lora):
    torch.manual_seed(1)
    config = ModelConfig(path=str(folder), lora=LoraConfig(rank=3, alpha=8.0, **lora))
    check_trained_part(config, "lm")
    return FSDPEngine(config, EngineConfig(dtype="float32"), OptimConfig(lr=0.01), total_steps=4)


@pytest.mark.parametrize(
    "model_type", each([name for name in ARCHITECTURES if name not in REFUSED], EACH_KIND)
)
def test_log_probs_are_those_of_merged_weights_and_all_adapters_learn(model_type, batch, tmp_path):
    model = small_model(model_type)
    model.save_pretrained(tmp_path)
    whole = whole_load_reason(ModelConfig(path=str(tmp_path)), "lm", trained=True)
    assert bool(whole) == (model_type in CONVERTED)  # the others are loaded by shards
    engine = build(tmp_path)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    found = engine.forward(batch)["log_probs"]
    before = naive_loop.target_log_probs(model, batch)
    merged = dict(engine.state_stream())
    assert not model.load_state_dict(merged, strict=False).unexpected_keys
    expected = naive_loop.target_log_probs(model, batch)
    mask = batch["response_mask"].bool()
    assert torch.allclose(found[mask], expected[mask], atol=5e-4)
    assert not torch.allclose(before[mask], expected[mask], atol=1e-2)
    without = names_without_gradient(engine, batch)
    assert not [name for name in without if not any(part in name for part in UNTRAINED)]


def names_without_gradient(engine, batch):
    """The trained parameters whose gradient is 0 or missing in a step."""
    names = []

    def step():
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any()):
                names.append(name)
        return 0.0, 0.0

    engine.optimizer.step = step
    mask = batch["response_mask"]
    weights = torch.linspace(-1, 1, mask.numel()).view_as(mask)
    engine.train_step(batch, lambda found, _: ((found["log_probs"] * weights).sum(), {}))
    return names


SECOND_NAME = "model.layers.3.shared_transf.self_attn.q_proj"
NO_PRODUCT = "no linear layer {!r} that can have"
TARGET, EXCLUDE = "target_modules", "exclude_modules"


@pytest.mark.parametrize(
    ("model_type", "lora", "message"),
    [
        *((name, {}, message) for name, message in REFUSED.items()),
        *(
            (name, {TARGET: (layer,)}, NO_PRODUCT.format(layer))
            for name, layer in (
                ("mamba2", "out_proj"), ("jamba", "dt_proj"), ("longcat_flash", "classifier"),
                ("phimoe", "router"), ("llama4_text", "router"), ("deepseek_v4", "o_a_proj"),
            )
        ),
        ("zamba", {TARGET: (SECOND_NAME,)}, rf"layers\.2.* and {SECOND_NAME} of .* are one weight"),
        ("llama", {EXCLUDE: ("all-linear",)}, NO_PRODUCT.format("all-linear")),
        ("llama", {EXCLUDE: ("q_proj",), TARGET: ("q_proj",)}, "change model.lora.exclude_modules"),
        ("llama", {TARGET: ()}, r"leaves no layer .* target_modules=\[\], .* change model.lora"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_adapted_are_refused(model_type, lora, message, tmp_path):
    small_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        build(tmp_path, **lora)
    assert not lora or model_type == "zamba" or caught.value.key == f"model.lora.{next(iter(lora))}"


def test_adapters_on_layers_that_peft_names_after_experts(batch, tmp_path):
    small_model("deepseek_v3").save_pretrained(tmp_path)
    engine = build(tmp_path, target_modules=("gate_proj",))
    adapted = {
        name.split(".lora_")[0] for name, p in engine.module.named_parameters() if p.requires_grad
    }
    assert adapted == {
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.shared_experts.gate_proj",
    }


def test_layers_that_peft_does_not_adapt_are_named_before_the_start(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no such layer")

    small_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("peft.inject_adapter_in_model", refuse)
    lora = LoraConfig(rank=3, target_modules=("q_proj",))
    message = "PEFT has no adapters for the layers of LlamaForCausalLM .*: no such layer"
    with pytest.raises(ConfigError, match=message) as caught:
        check_trained_part(ModelConfig(path=str(tmp_path), lora=lora), "lm")
    assert caught.value.key == "model.lora.target_modules"
