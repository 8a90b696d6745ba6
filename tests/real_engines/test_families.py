"""Mixtures of experts, and a model that vLLM takes from transformers, beside a trainer."""

import pytest
import torch
import transformers
from agreement import ENGINES, GREEDY, MODELS, SIZES, needs, requests, write_model

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import ModelError
from quadriga.rollout import build_rollout
from quadriga.weight_sync.sync import WeightSync
from training_step import train_once

OPTIONS = {"vllm": {"kv_cache_mb": 64}, "sglang": {"request_rows": 32}}
CHOICE = {"num_experts_per_tok": 2}
FAMILIES = {
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, **CHOICE, num_experts=4, moe_intermediate_size=32, head_dim=32
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, **CHOICE, num_local_experts=4, head_dim=32)
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SIZES | {"num_key_value_heads": 2}, **CHOICE, num_experts=4)
    ),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES)),
}
DEFAULT = {("vllm", "qwen3_moe"), ("vllm", "olmo2"), ("sglang", "qwen3_moe")}
CASES = [
    pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.nightly)
    for case in ((engine, family) for engine in ENGINES for family in FAMILIES)
]
pytestmark = [
    pytest.mark.skipif(not ENGINES, reason="no engine is installed; see make engines"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(("engine", "family"), CASES)
def test_an_engine_computes_what_the_trainer_beside_it_has_learnt(
    tmp_path, engine, family, monkeypatch
):
    monkeypatch.setitem(MODELS, family, FAMILIES[family])
    model = ModelConfig(path=write_model(family, tmp_path / "model"))
    ours = build_rollout(engine, model, dtype="float32", **OPTIONS[engine])
    hf = build_rollout("hf", model, dtype="float32")
    trainer = build_engine(model, EngineConfig(), OptimConfig(lr=0.01))
    ids, mask, seeds = requests()
    try:
        syncs = [WeightSync(trainer, target) for target in (ours, hf)]
        before = hf.score(ids, mask)
        for version in (0, 1, 2):
            if version:
                train_once(trainer, tokens=20)
                for sync in syncs:
                    sync.run(version)
            scores = [each.score(ids, mask) for each in (ours, hf)]
            torch.testing.assert_close(*scores, atol=1e-4, rtol=0)
            drawn = [each.generate(ids, mask, GREEDY, seeds) for each in (ours, hf)]
            assert drawn[0].response_ids.equal(drawn[1].response_ids)
        assert (scores[0] - before).abs().max() > 0.1
    finally:
        ours.close()
        hf.close()


@needs("vllm")
def test_adapters_of_a_mixture_on_a_cpu_are_refused_before_vllm_loads(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "mixtral", FAMILIES["mixtral"])
    model = ModelConfig(path=write_model("mixtral", tmp_path), lora=LoraConfig(rank=2))
    with pytest.raises(ModelError, match=r"Triton.*load_adapters=false, which merges them"):
        build_rollout("vllm", model, dtype="float32", **OPTIONS["vllm"])
