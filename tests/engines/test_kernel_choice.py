"""Which attention kernel computes a call, and the comparison of kernels on a device."""

import logging
from dataclasses import replace

import attention_cases as cases
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.attention import kernels
from quadriga.engines.attention.choice import CAPABILITY, choose_kernels, kernel_problem
from quadriga.engines.attention.kernels import AttentionCall, LocalMask
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError

BF16 = AttentionCall(torch.bfloat16, heads=4, key_heads=2, size=64, value_size=64)
FLOAT32 = replace(BF16, dtype=torch.float32)


def choose(*calls, setting="auto", device_type="cuda", capability=CAPABILITY, check=None):
    return choose_kernels(
        calls, setting, device_type=device_type, capability=capability,
        check=check or (lambda kernel, call: None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (BF16, "varlen"),
        (replace(BF16, dtype=torch.float16), "varlen"),
        (replace(BF16, mask="window"), "varlen"),
        (replace(BF16, size=192, value_size=128), "varlen"),
        (replace(BF16, size=8, value_size=8), "varlen"),
        (replace(BF16, size=512, value_size=512), "flex"),
        (replace(BF16, mask="chunk"), "flex"),
        (replace(BF16, softcap=True), "flex"),
        (replace(BF16, sinks=True, mask="window"), "flex"),
        (FLOAT32, "flex"),
        (replace(BF16, softcap=True, size=8, value_size=8), "sdpa"),
        (replace(BF16, mask="other"), "sdpa"),
        (replace(BF16, dtype=torch.float64), "sdpa"),
    ],
    ids=str,
)
def test_the_fastest_exact_kernel_is_chosen(call, kernel):
    assert choose(call) == {call: kernel}
    assert choose(call, setting="sdpa") == {call: "sdpa"}
    assert choose(call, capability=(7, 5)) == choose(call, device_type="npu") == {call: "sdpa"}


@pytest.mark.parametrize(
    ("setting", "call", "message"),
    [
        ("varlen", FLOAT32, "computes bfloat16 or float16, and attention is in float32"),
        ("varlen", replace(BF16, softcap=True), "cannot compute capped scores; set it to auto"),
        ("varlen", replace(BF16, sinks=True), "cannot compute attention sinks"),
        ("varlen", replace(BF16, mask="chunk"), "this model has another mask"),
        ("varlen", replace(BF16, size=288), "at most 256 elements, this model has 288"),
        ("flex", replace(BF16, dtype=torch.float64), "attention is in float64"),
        ("flex", replace(BF16, mask="other"), "this model has another mask"),
        ("flex", replace(BF16, size=8), "at least 16 elements, this model has 8"),
    ],
)
def test_a_kernel_that_cannot_compute_a_call_is_refused(setting, call, message):
    with pytest.raises(ConfigError, match=f"engine.attention={setting} cannot .*{message}"):
        choose(BF16, call, setting=setting)


@pytest.mark.parametrize("setting", ["varlen", "flex"])
def test_kernels_of_accelerators_are_refused_elsewhere(setting, model_folder):
    with pytest.raises(ConfigError, match="the device of this role is 'npu'"):
        choose(BF16, setting=setting, device_type="npu")
    with pytest.raises(ConfigError, match=r"compute capability 8\.0, got 7\.5"):
        choose(BF16, setting=setting, capability=(7, 5))
    with pytest.raises(
        ConfigError, match=f"attention={setting} .*the device of this role is 'cpu'"
    ):
        FSDPEngine(ModelConfig(path=model_folder), EngineConfig(attention=setting), OptimConfig())
    with pytest.raises(ConfigError, match=f"attention={setting} needs packed rows, and Llama"):
        FSDPEngine(
            ModelConfig(path=model_folder), EngineConfig(attention=setting), packed=False
        )  # fmt: skip


def test_a_kernel_with_wrong_numbers_is_not_used(caplog):
    def only_sdpa(kernel, call):
        return None if kernel == "sdpa" else "its outputs differ by 1 of the largest one"

    with caplog.at_level(logging.WARNING):
        assert choose(BF16, check=only_sdpa) == {BF16: "sdpa"}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"the attention kernel {kernel} is not used: its outputs differ by 1 of the largest one"
        for kernel in ("varlen", "flex")
    ]
    with pytest.raises(ConfigError, match=r"attention=flex .*outputs differ by 1"):
        choose(BF16, setting="flex", check=only_sdpa)


def test_a_mask_of_another_form_is_told_apart():
    assert LocalMask(lambda row, head, query, key: key <= query, 4).kind == "other"
    assert cases.local_mask(cases.Sizes(kind="window")).kind == "window"
    assert cases.local_mask(cases.Sizes(kind="chunk")).kind == "chunk"
    window_of_3 = cases.local_mask(cases.Sizes(kind="window", local=3))
    assert LocalMask(window_of_3._function, 4).kind == "other"


def test_every_kernel_passes_the_comparison(monkeypatch):
    monkeypatch.setattr(kernels, "varlen_attn", cases.naive_flash)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(kernels, "compiled", lambda: flex_module.flex_attention)
    small = replace(FLOAT32, size=12, value_size=8)
    for changes in ({}, {"mask": "window"}, {"dtype": torch.bfloat16}, {"part": True}):
        assert kernel_problem("varlen", replace(small, **changes), cases.CPU) is None
    for changes in ({}, {"softcap": True}, {"sinks": True, "mask": "window"}, {"mask": "chunk"}):
        assert kernel_problem("flex", replace(small, **changes), cases.CPU) is None


def one_more(*arguments, window_size, **settings):
    """A kernel whose window has one more token."""
    before, after = window_size
    wider = (before + (before >= 0), after)
    return cases.naive_flash(*arguments, window_size=wider, **settings)


def without_gradient_of_keys(q, k, *arguments, **settings):
    return cases.naive_flash(q, k.detach() + 0 * k, *arguments, **settings)


def not_a_number(*arguments, **settings):
    return cases.naive_flash(*arguments, **settings) * torch.nan


def no_kernel(*arguments, **settings):
    raise NotImplementedError("no kernel image")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (one_more, "its outputs differ by"),
        (not_a_number, "its outputs differ by nan"),
        (without_gradient_of_keys, "its gradients of keys differ by"),
        (no_kernel, "it fails on this device: NotImplementedError: no kernel image"),
    ],
)
def test_a_wrong_kernel_fails_the_comparison(kernel, message, monkeypatch):
    monkeypatch.setattr(kernels, "varlen_attn", kernel)
    call = replace(BF16, size=8, value_size=8, mask="window" if kernel is one_more else "causal")
    assert message in kernel_problem("varlen", call, cases.CPU)
