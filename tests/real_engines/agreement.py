"""Small models, prompts, and the comparison of an engine with `hf` that all engines share."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.loading import load_config
from quadriga.errors import RolloutError
from quadriga.rollout.base import Continued, RolloutEngine, SamplingParams

GREEDY = SamplingParams(
    max_new_tokens=24, eos_token_ids=(2,), pad_token_id=0, temperature=0.0, log_probs="policy"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 197,  # the engines hold a multiple of 64 rows
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32, "sliding_window": 8}
LAYERS = ["sliding_attention", "full_attention"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "llama, grouped queries": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral, window of 8": lambda: MistralForCausalLM(MistralConfig(**SIZES, **HEADS)),
    "gemma3, one layer with a window of 8": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, **HEADS, layer_types=LAYERS, query_pre_attn_scalar=32)
    ),
}
OF_SGLANG = [name for name in MODELS if "mistral" not in name]
"""The models that SGLang computes as transformers does. It ignores the window of Mistral."""
ENGINES = [name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None]
"""The engines of this environment."""
ENGINES_AND_MODELS = [
    (engine, model) for engine in ENGINES for model in (OF_SGLANG if engine == "sglang" else MODELS)
]


def needs(engine: str) -> pytest.MarkDecorator:
    """Skip the tests of a module where an engine is not installed."""
    return pytest.mark.skipif(
        engine not in ENGINES, reason=f"no {engine} here; `scripts/engines.sh {engine}` installs it"
    )


def write_model(name: str, folder: Path) -> str:
    """Write a model of `MODELS` with random weights, norms and biases included."""
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return str(folder)


def write_task(folder: Path, *more: str) -> None:
    """Write arithmetic tasks to `folder / "data"` and a model without training to "base"."""
    sizes = (
        "train_size=64", "val_size=8", "sft_size=4", "max_number=5", "hidden_size=64",
        "num_layers=2", "num_heads=2", "num_kv_heads=1", "intermediate_size=64",
    )  # fmt: skip
    places = f"output={folder / 'data'}", f"model_output={folder / 'base'}"
    run_make_data(load_config(ArithmeticDataConfig, [*places, *sizes, *more]))


def requests(lengths: Sequence[int] = (70, 3, 17)) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and seeds of prompts, some longer than a window and a block of the cache."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(
            3, 190, (length,), generator=torch.Generator().manual_seed(row)
        )
        mask[row, -length:] = 1
    return ids, mask, torch.arange(len(lengths))


def check_agreement(engine: RolloutEngine, hf: RolloutEngine) -> None:
    """Check that both engines hold the same weights, generate the same greedy tokens, and agree in
    log-probabilities to 1e-4."""
    ids, mask, seeds = requests()
    first, second = (each.generate(ids, mask, GREEDY, seeds) for each in (engine, hf))
    assert torch.equal(first.response_ids, second.response_ids)
    assert torch.equal(first.response_mask, second.response_mask)
    assert first.finish_reason == second.finish_reason
    torch.testing.assert_close(first.rollout_log_probs, second.rollout_log_probs, atol=1e-4, rtol=0)
    scores = [each.score(ids, mask) for each in (engine, hf)]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)
    assert engine.weights_digest() == hf.weights_digest()


def check_refusal(engine: RolloutEngine) -> None:
    """Check that the engine goes on after a request that only the engine itself refuses."""
    before = engine.generate(*requests()[:2], GREEDY, requests()[2])
    ids, one = torch.full((1, 500), 5), Continued(torch.zeros(1, dtype=torch.int64), 4)
    with (
        mock.patch.object(engine, "check_request", lambda *_: one),
        pytest.raises(RolloutError, match=r"refuse.*500"),
    ):
        engine.generate(ids, torch.ones_like(ids), GREEDY, torch.zeros(1, dtype=torch.int64))
    after = engine.generate(*requests()[:2], GREEDY, requests()[2])
    assert torch.equal(after.response_ids, before.response_ids)


def check_prefix_cache(
    engine: RolloutEngine, weights: dict[str, Tensor], cached: list[int], page: int
) -> None:
    """Check that a slice computes its earlier tokens again only in the page of the last one, or
    after an update, unless caches are kept. `cached` receives for each request how many tokens were
    not computed."""
    sampling = replace(GREEDY, eos_token_ids=())
    for version in (5, 6):
        engine.update_weights(weights.items(), version)
        ids, mask, seeds = requests((70, 40))
        cached.clear()
        for sampled in (0, 4):
            begun = Continued(torch.full((2,), sampled), 4)
            out = engine.generate(ids, mask, sampling, seeds, continued=begun)
            ids = torch.cat([ids, out.response_ids], 1)
            mask = torch.cat([mask, out.response_mask], 1)
        assert cached[:2] == [0, 0]
        assert sorted(cached[2:]) == [tokens // page * page for tokens in (43, 73)]
    engine._resets_caches, began = False, torch.full((2,), 7)
    for version, sampled in ((7, 0), (8, 8), (8, 0)):  # new ones, their next slice, the same again
        engine.update_weights(weights.items(), version)
        cached.clear()
        begun = Continued(torch.full((2,), sampled), 4, began=began if sampled else None)
        out = engine.generate(ids, mask, sampling, seeds, continued=begun)
        found = [tokens // page * page for tokens in (47, 77)] if sampled else [0, 0]
        assert sorted(cached) == found
    engine._resets_caches = True
