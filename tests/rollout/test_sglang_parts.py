"""Parts of the engine `sglang` that need no other process: options, buckets, layouts, windows."""

from __future__ import annotations

import pickle

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Olmo3Config, Qwen2Config

from quadriga.errors import ConfigError, ModelError
from quadriga.rollout import check_rollout
from quadriga.rollout.sglang.readback import locate
from quadriga.rollout.sglang.sliding import check_sliding_windows
from quadriga.rollout.sglang.weights import buckets


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transprot": "engine"}, "did you mean 'transport'"),
        ({"transport": "pipe"}, "one of engine, server"),
        ({"bucket_mb": 0}, "at least 1"),
        ({"bucket_mb": True}, "of type int"),
        ({"call_timeout_s": 0}, "above 0"),
        ({"restarts": -1}, "at least 0"),
        ({"log_probs": "sampled"}, "one of policy, temperature_1"),
        ({"api_key": "x"}, "url, which is not set"),
        ({"url": "https://a"}, "of the form"),
        ({"url": "http://a:1", "restarts": 1}, "runs already"),
        ({"server_args": {"port": 1}}, "the port is chosen"),
        ({"python": "/no/such/python"}, "an interpreter"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_start(options, text):
    with pytest.raises(ConfigError, match=text):
        check_rollout("sglang", options)


def test_an_interpreter_without_sglang_is_named(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho sglang >&2\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="does not find sglang; make an environment with") as e:
        check_rollout("sglang", {"python": str(python)})
    assert "\n" not in str(e.value)


def test_buckets_are_bounded_and_hold_each_weight_once():
    weights = {"a": torch.arange(10.0), "b": torch.arange(4.0), "c": torch.arange(20.0)}
    parts = list(buckets(weights.items(), 64))
    assert [part.names for part in parts] == [("a", "b"), ("c",)]
    found = [pickle.loads(part.payload) for part in parts]
    assert [[(e.name, e.start_idx, e.end_idx) for e in b["metadata"]] for b in found] == [
        [("a", 0, 40), ("b", 48, 64)],
        [("c", 0, 80)],
    ]
    for bucket in found:
        for entry in bucket["metadata"]:
            part = bucket["flattened_tensor"][entry.start_idx : entry.end_idx].view(entry.dtype)
            assert torch.equal(part.view(entry.shape), weights[entry.name])


def test_parts_of_fused_and_padded_parameters_are_located():
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.q_proj.weight": (4, 3),
        f"{layer}self_attn.k_proj.weight": (2, 3),
        f"{layer}self_attn.v_proj.weight": (2, 3),
        "model.embed_tokens.weight": (5, 3),
        "lm_head.weight": (5, 3),
        "model.norm.weight": (3,),
    }
    whole = torch.arange(24.0).view(8, 3)
    held = {
        f"{layer}self_attn.qkv_proj.weight": whole,
        "model.embed_tokens.weight": whole,
        "model.norm.weight": torch.ones(4),
    }
    assert torch.equal(locate(held, f"{layer}self_attn.k_proj.weight", shapes), whole[4:6])
    assert torch.equal(locate(held, f"{layer}self_attn.v_proj.weight", shapes), whole[6:])
    assert torch.equal(locate(held, "lm_head.weight", shapes), whole[:5])  # tied
    assert locate(held, "model.norm.weight", shapes) is None
    assert locate(held, "model.other.weight", shapes) is None
    # Split over two GPUs, the parameter has half of the rows.
    held[f"{layer}self_attn.qkv_proj.weight"] = whole[:4]
    assert locate(held, f"{layer}self_attn.k_proj.weight", shapes) is None


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (MistralConfig(sliding_window=8), True),
        (MistralConfig(sliding_window=None), False),
        (MistralConfig(sliding_window=4096), False),  # not shorter than a sequence
        (Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=0), True),
        (Qwen2Config(use_sliding_window=False, sliding_window=8), False),
        (Olmo3Config(sliding_window=8), False),  # SGLang computes its windows
        (LlamaConfig(), False),
    ],
)
def test_windows_that_sglang_ignores_are_refused(config, refused):
    if refused:
        with pytest.raises(ModelError, match="window of 8 tokens"):
            check_sliding_windows(config, 4096)
    else:
        check_sliding_windows(config, 4096)
