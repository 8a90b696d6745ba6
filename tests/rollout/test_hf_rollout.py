"""`HFRollout` against a naive loop: one row at a time, a whole forward pass for each token."""

import dataclasses
import shutil

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.data.loader import pad_rows
from quadriga.models.loading import load_causal_lm
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf.generation import draw, uniform

SAMPLING = SamplingParams(max_new_tokens=12, eos_token_ids=tuple(range(3, 20)), pad_token_id=0)


@pytest.fixture(scope="module")
def rollout(model_folder):
    return build_rollout("hf", ModelConfig(path=model_folder), micro_batch_size=5)


@pytest.fixture(scope="module")
def model(model_folder):
    return load_causal_lm(model_folder)


@pytest.fixture(scope="module")
def prompts():
    """Eight rows with two columns of padding in every row; rows 1, 4, 6 repeat other prompts."""
    random = torch.Generator().manual_seed(1)
    lengths = [3, 3, 5, 1, 5, 7, 3, 2]
    rows = [torch.randint(20, 200, (n,), generator=random).tolist() for n in lengths]
    ids, mask = pad_rows(rows, 0, 9, "left")
    for row, same in ((1, 0), (4, 2), (6, 0)):
        ids[row] = ids[same]
    return ids, mask, torch.arange(100, 108)


def naive(model, ids, mask, seed, sampling):
    tokens, log_probs = ids[mask.bool()].tolist(), []
    start = len(tokens)
    for position in range(sampling.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[:, -1]
        place = torch.tensor([position])
        number = uniform(torch.tensor([seed]), place)[:, 0]
        token, log_prob = draw(logits, sampling, number, place)
        tokens.append(int(token))
        log_probs.append(float(log_prob))
        if tokens[-1] in sampling.eos_token_ids:
            return tokens[start:], log_probs, "stop"
    return tokens[start:], log_probs, "length"


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"temperature": 1.7, "top_k": 40}, {"top_p": 0.7}],
    ids=str,
)
def test_generation_equals_the_naive_loop(rollout, model, prompts, settings):
    sampling = dataclasses.replace(SAMPLING, **settings)
    ids, mask, seeds = prompts
    out = rollout.generate(ids, mask, sampling, seeds)
    assert out.response_ids.shape == out.response_mask.shape == (8, 12)
    for row in range(8):
        tokens, log_probs, reason = naive(model, ids[row], mask[row], int(seeds[row]), sampling)
        n = len(tokens)
        assert out.response_ids[row].tolist() == tokens + [0] * (12 - n)
        assert out.response_mask[row].tolist() == [1] * n + [0] * (12 - n)
        assert out.rollout_log_probs[row, :n].tolist() == pytest.approx(log_probs, abs=2e-5)
        assert not out.rollout_log_probs[row, n:].any()
        assert out.finish_reason[row] == reason


def test_a_config_that_asks_for_router_logits(model_folder, prompts, tmp_path):
    """In bfloat16 the engine gives the model a mask, which has more tokens than the routers."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    responses = []
    for asks in (False, True):
        config = MixtralConfig(
            **sizes, vocab_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_local_experts=4, output_router_logits=asks,
        )  # fmt: skip
        shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(tmp_path)
        rollout = build_rollout("hf", ModelConfig(path=str(tmp_path)), dtype="bfloat16")
        responses.append(rollout.generate(*prompts[:2], SAMPLING, prompts[2]).response_ids)
    assert responses[0].equal(responses[1])


def test_training_engine_computes_the_same_log_probs(model_folder, rollout, prompts):
    from quadriga.engines.fsdp import FSDPEngine

    ids, mask, seeds = prompts
    sampling = dataclasses.replace(SAMPLING, temperature=0.6, top_k=30)
    out = rollout.generate(ids, mask, sampling, seeds)
    engine = FSDPEngine(ModelConfig(path=model_folder), EngineConfig())
    batch = {
        "input_ids": torch.cat([ids, out.response_ids], 1),
        "attention_mask": torch.cat([mask, out.response_mask], 1),
        "response_mask": out.response_mask,
    }
    found = engine.forward(batch, temperature=0.6)["log_probs"]
    assert torch.allclose(found, out.rollout_log_probs, atol=2e-5)
