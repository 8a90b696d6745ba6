"""Whole models with the kernels of accelerators: the same log-probabilities and gradients."""

from __future__ import annotations

import attention_cases as cases
import engine_cases
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module
from transformers import AutoModelForCausalLM

from quadriga.config.schema import ModelConfig
from quadriga.engines.attention import kernels
from quadriga.engines.attention.kernels import Kernel
from quadriga.engines.loading import load_model
from quadriga.engines.token_model import TokenModel


@pytest.fixture
def kernels_on_a_cpu(monkeypatch):
    kernel = cases.compiled_for_cpu()
    monkeypatch.setattr(kernels, "varlen_attn", cases.naive_flash)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(kernels, "compiled", lambda: kernel)


def small_folder(model_type, folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cases.small_config(model_type))
    model.save_pretrained(folder)
    return str(folder)


def computed(folder, kernels, batch, dtype, **settings):
    """Return log-probabilities and gradients, and the set of kernels that were used."""
    config = ModelConfig(path=folder, **settings)
    model = load_model(config, "lm", dtype, trained=True)
    token_model = TokenModel(model, "lm", cases.CPU)
    used: set[Kernel] = set()

    def kernel_of(call):
        kernel = kernels(call)
        used.add(kernel)
        return kernel

    token_model.kernel_of = kernel_of
    found = token_model(batch, temperature=1.0, entropy=False)["log_probs"]
    (found * batch["weight"]).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), gradients, used


def as_on_cuda(call) -> Kernel:
    plain = call.mask in ("causal", "window") and not (call.softcap or call.sinks)
    return "varlen" if plain else "flex"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "used", "checkpointing"),
    [
        ("llama", {"varlen"}, True),
        ("llama", {"varlen"}, "selective"),
        ("qwen2", {"varlen"}, False),
        ("gemma2", {"flex"}, True),
        ("gemma2", {"flex"}, "selective"),
        ("gpt_oss", {"flex"}, "selective"),
        ("llama4_text", {"varlen", "flex"}, False),
        ("deepseek_v3", {"varlen"}, False),
    ],
)
def test_models_give_the_same_numbers_as_with_sdpa(
    model_type, used, checkpointing, tmp_path, kernels_on_a_cpu
):
    folder, batch = small_folder(model_type, tmp_path), engine_cases.make_batch()
    # The product of grouped rows (experts of gpt-oss) has no float64.
    dtype = torch.float32 if model_type == "gpt_oss" else torch.float64
    expected = computed(folder, lambda call: "sdpa", batch, dtype)
    found = computed(folder, as_on_cuda, batch, dtype, gradient_checkpointing=checkpointing)
    assert found[2] == used
    # Log-sums are float32 in rotary embeddings and norms of some models, hence not 1e-12.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(found[:2], expected[:2], rtol=tolerance, atol=tolerance)
