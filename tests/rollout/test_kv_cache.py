"""The caches of the engine hf: growing buffers, and prompts that rows share."""

import pytest
import torch
import transformers

from quadriga.config.schema import ModelConfig
from quadriga.data.loader import pad_rows
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf import kv_cache

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SHARING = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4),
}
OTHERS = {
    "layers with windows": lambda: transformers.MistralConfig(sliding_window=6, **SIZES),
    "values are changed after the cache": lambda: transformers.DiffLlamaConfig(**SIZES),
    "keys are changed after the cache": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, n_routed_experts=4,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=24, first_k_dense_replace=1,
    ),
}  # fmt: skip


def built(config, dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompts():
    """Seven rows of three prompts of 5, 9 and 2 tokens, not in the order of the prompts."""
    rows = [(torch.arange(n) * 7 % 90 + row).tolist() for row, n in enumerate([5, 9, 2])]
    ids, mask = pad_rows(rows, 0, 9, "left")
    of_row = torch.tensor([0, 1, 0, 2, 1, 0, 1])
    return ids[of_row], mask[of_row]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A function from the name of a family to the folder of its model."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp("model"))
            built((SHARING | OTHERS)[family]()).save_pretrained(made[family])
        return made[family]

    return folder


@pytest.mark.parametrize("family", [*SHARING, *OTHERS])
def test_both_caches_give_the_same_tokens(family, folders, monkeypatch):
    """Many rows end early, so that rows move and prompts without rows are dropped."""
    ids, mask = prompts()
    sampling = SamplingParams(20, eos_token_ids=tuple(range(8)), pad_token_id=0)
    engine = build_rollout("hf", ModelConfig(path=folders(family)))
    assert engine._cached.shares_prompts is (family in SHARING)
    counts = []
    keep = kv_cache.SharedPrompts.keep_rows

    def recorded(cache, order):
        keep(cache, order)
        counts.append((len(order), cache.rows.prompts))
        layer = cache.growing[0]
        assert layer.prompt_keys.shape[0] == cache.rows.prompts
        if layer.is_initialized:  # it is empty if rows end with their first token
            assert layer.keys.shape[0] == len(order)

    monkeypatch.setattr(kv_cache.SharedPrompts, "keep_rows", recorded)
    for seed in range(4):
        seeds = torch.arange(7) + 100 * seed
        engine._cached.shares_prompts = family in SHARING
        out = engine.generate(ids, mask, sampling, seeds)
        engine._cached.shares_prompts = False
        repeated = engine.generate(ids, mask, sampling, seeds)
        assert torch.equal(out.response_ids, repeated.response_ids)
        both = out.rollout_log_probs, repeated.rollout_log_probs
        torch.testing.assert_close(*both, atol=2e-5, rtol=0)
    if family in SHARING:
        assert min(prompts for _, prompts in counts) < 3  # a prompt was dropped


def test_a_prompt_is_held_once():
    model = built(SHARING["llama"]())
    assert kv_cache.use_decode_attention(model)
    sizes = {}
    for kind in (kv_cache.SharedPrompts, kv_cache.RepeatedPrompts):
        cache = kind(model)
        with torch.inference_mode():
            model(torch.arange(40).view(1, 40), past_key_values=cache.cache, use_cache=True)
        cache.begin_rows(torch.zeros(8, dtype=torch.int64), None)
        sizes[kind] = sum(tensor.nbytes for tensor in kv_cache.cache_tensors(cache.cache))
    # 2 layers, keys and values, 2 heads of size 8, float32; 64 spare columns where rows are copied.
    assert sizes == {kv_cache.SharedPrompts: 40 * 256, kv_cache.RepeatedPrompts: 8 * 104 * 256}


# Growing buffers


def tokens(count: int) -> torch.Tensor:
    """Keys of `count` tokens for two rows, one head and head size 1."""
    return torch.arange(2.0 * count).view(2, 1, count, 1)


def test_buffer_grows_once_in_65_tokens():
    """The example in `kv_cache.py`."""
    layer = kv_cache.GrowingCacheLayer()
    layer.update(tokens(3), tokens(3))
    assert layer.keys.shape[2] == 67
    for _ in range(64):
        layer.update(tokens(1), tokens(1))
    assert (layer.length, layer.keys.shape[2]) == (67, 67)
    keys, values = layer.update(tokens(1), tokens(1) + 5)
    assert (layer.length, layer.keys.shape[2]) == (68, 132)
    assert keys[:, 0, :3, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert keys[:, 0, -1, 0].tolist() == [0, 1]
    assert values[:, 0, -1, 0].tolist() == [5, 6]


def test_reorder_cache_removes_and_repeats_rows_in_every_layer():
    cache = kv_cache.growing_cache(transformers.LlamaConfig(num_hidden_layers=2))
    assert kv_cache.sees_all_tokens(cache)
    for index in range(2):
        cache.update(tokens(3), tokens(3), index)
    kv_cache.reorder_cache(cache, torch.tensor([0, 0, 1]))
    for layer in cache.layers:
        keys, _ = layer.update(torch.full((3, 1, 1, 1), 9.0), torch.zeros(3, 1, 1, 1))
        assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 9], [0, 1, 2, 9], [3, 4, 5, 9]]
    kv_cache.reorder_cache(cache, torch.tensor([2]))
    assert cache.layers[1].keys[0, 0, :4, 0].tolist() == [3, 4, 5, 9]


def test_window_layer_returns_the_columns_that_the_next_token_sees():
    """The example in `kv_cache.py`."""
    cache = kv_cache.growing_cache(
        transformers.MistralConfig(num_hidden_layers=1, sliding_window=3)
    )
    assert not kv_cache.sees_all_tokens(cache) and cache.is_sliding == [True]
    (layer,) = cache.layers
    layer.update(tokens(5), tokens(5))
    assert layer.get_mask_sizes(1) == (3, 3)
    keys, values = layer.update(tokens(1) + 20, tokens(1) + 30)
    assert keys[:, 0, :, 0].tolist() == [[3, 4, 20], [8, 9, 21]]
    assert values[0, 0, :, 0].tolist() == [3, 4, 30]
