"""The memory of generation, computed from a config.json, against what the engine allocates."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig

from memory_models import CONFIGS as FAMILIES, SIZES, peak_of
from quadriga.config.schema import ModelConfig, RolloutConfig, SamplingConfig
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf import generation
from quadriga.rollout.hf.kv_cache import cache_tensors
from quadriga.rollout.hf.memory import generation_memory
from quadriga.rollout.memory import GenerationUse

CONFIGS = FAMILIES | {
    "bloom, which takes no bias": lambda: BloomConfig(
        vocab_size=384, hidden_size=64, n_layer=2, n_head=4
    ),
    "large vocabulary": lambda: LlamaConfig(**{**SIZES, "vocab_size": 20000}),
}
ROWS = GenerationUse(12, 3, 40, 70, SamplingConfig(), "cpu")
SAMPLING = SamplingParams(max_new_tokens=70, eos_token_ids=(), pad_token_id=0)


def prompts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 12 left-padded rows of 3 distinct prompts of these lengths."""
    mask = torch.zeros(3, ROWS.prompt, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, ROWS.prompt - length :] = 1
    ids = torch.arange(3)[:, None] * mask + 5
    return ids.repeat_interleave(4, 0), mask.repeat_interleave(4, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 31, 22]], ids=["equal", "padded"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_plan_is_what_generation_allocates(family, lengths, tmp_path, monkeypatch):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    engine = build_rollout("hf", model)
    held = []
    collect = generation.Generation.collect

    def recorded(self):
        held.append(sum(tensor.nbytes for tensor in cache_tensors(self.rows.cache)))
        return collect(self)

    monkeypatch.setattr(generation.Generation, "collect", recorded)
    ids, mask = prompts(lengths)
    peak = peak_of(lambda: engine.generate(ids, mask, SAMPLING, torch.arange(12)))
    plan = generation_memory(RolloutConfig(), model, ROWS)
    assert held == [plan.adds["generate"]["KV cache"]]
    assert plan.peak("generate") == pytest.approx(peak, rel=0.15)
    weights = {t.untyped_storage().data_ptr(): t.nbytes for t in engine.module.parameters()}
    assert plan.held["weights"] == pytest.approx(sum(weights.values()), rel=0.01)
