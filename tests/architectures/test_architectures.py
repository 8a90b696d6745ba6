"""Every architecture in `models/architectures.py` against the naive loop, or refused by name."""

import json
from dataclasses import replace

import naive_loop
import pytest
import torch
from document import PAGE, page_with_tables
from naive_loop import END_TOKENS, PROMPT_WIDTH, RESPONSE_WIDTH
from small_models import VARIANTS, VOCABULARY, small_model
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quadriga.config.schema import ModelConfig
from quadriga.engines.loading import load_model
from quadriga.engines.token_model import TokenModel
from quadriga.errors import ModelError
from quadriga.models import check_model_folder
from quadriga.models.architectures import ARCHITECTURES, REFUSED
from quadriga.protocol import DataProto
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams
from quadriga.workers.actor_rollout_ref import generate_batch
from quadriga.workers.method_fields import BEGUN_RESPONSES
from rollout_slices import in_slices, in_turns

torch.set_num_threads(1)
CPU = torch.device("cpu")
EACH_KIND = (
    "bloom", "cohere2", "ctrl", "deepseek_v2", "deepseek_v32", "deepseek_v4", "diffllama",
    "falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_oss", "granite", "jamba", "jetmoe", "kimi_linear", "lfm2", "llama",
    "llama4_text", "mamba2", "minimax_m3_vl_text", "mistral", "mixtral", "nanochat", "olmo2", "opt",
    "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next", "smollm3", "zamba2",
)  # fmt: skip
"""With each kind of attention, mask, positions, experts and recurrence. All run nightly."""
CASES = [
    pytest.param(name, {}, marks=() if name in EACH_KIND else pytest.mark.nightly)
    for name in ARCHITECTURES
] + VARIANTS
TOLERANCE = 3e-4


def case_name(value):
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.fixture(scope="module")
def batch():
    return naive_loop.make_batch(VOCABULARY)


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=case_name)
def test_training_and_generation_equal_the_naive_loop(model_type, changes, batch, tmp_path):
    model = small_model(model_type, changes)
    model.save_pretrained(tmp_path)
    trained = check_training(model, ARCHITECTURES[model_type].rows, str(tmp_path), batch)
    check_generation(model, trained, str(tmp_path), batch)


def check_training(model, rows, folder, batch):
    """Log-probabilities and gradients, with and without packing, with activation checkpointing.

    Returns:
        The model that training uses by default.
    """
    model.requires_grad_(True)
    expected = naive_loop.target_log_probs(model, batch)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (expected * weights).sum().backward()
    models = []
    for packed in [False, None] if rows == "packed" else [None]:
        config = ModelConfig(path=folder, gradient_checkpointing=has_checkpointing(model))
        trained = load_model(config, "lm", torch.float32, trained=True)
        token_model = TokenModel(trained, "lm", CPU, packed=packed)
        models.append(token_model)
        found = token_model(batch, temperature=1.0, entropy=False)["log_probs"]
        assert torch.allclose(found, expected, atol=TOLERANCE), f"packed={packed}"
        (found * weights).sum().backward()
        for (name, one), (_, other) in zip(
            trained.named_parameters(), model.named_parameters(), strict=True
        ):
            if other.grad is not None:
                scale = float(other.grad.abs().max())
                assert torch.allclose(one.grad, other.grad, atol=2e-3 * scale + 1e-4), name
    default = models[-1]
    assert default.packed is (rows == "packed")
    if default.packed:  # the attention kernels know no other masks
        assert {call.mask for call in default._attention_calls()} <= {"causal", "window", "chunk"}
    model.requires_grad_(False)
    return default


def has_checkpointing(model):
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def check_generation(model, token_model, folder, batch):
    """Greedy tokens, their log-probabilities, and those that training computes for them."""
    rollout = build_rollout("hf", ModelConfig(path=folder), micro_batch_size=4)
    sampling = SamplingParams(RESPONSE_WIDTH, END_TOKENS, pad_token_id=0, temperature=0.0)
    prompts = {name: batch[name][:, :PROMPT_WIDTH] for name in ("input_ids", "attention_mask")}
    seeds = torch.arange(len(batch["input_ids"]))
    out = rollout.generate(prompts["input_ids"], prompts["attention_mask"], sampling, seeds)
    generated = {
        "input_ids": torch.cat([prompts["input_ids"], out.response_ids], 1),
        "attention_mask": torch.cat([prompts["attention_mask"], out.response_mask], 1),
        "response_mask": out.response_mask,
    }
    mask = out.response_mask.bool()
    with torch.no_grad():
        log_p = torch.stack(naive_loop.response_log_probs(model, generated))
        trained = token_model(generated, temperature=1.0, entropy=False)["log_probs"]
    best, token = log_p.max(-1)
    assert torch.equal(out.response_ids[mask], token[mask])
    assert torch.allclose(out.rollout_log_probs[mask], best[mask], atol=TOLERANCE)
    assert torch.allclose(out.rollout_log_probs, trained, atol=TOLERANCE)
    # Responses that go on behind 0, 1, 2 … of their tokens are the same.
    count = seeds.clamp(max=mask.sum(1) - 1)[:, None]
    begun = torch.arange(RESPONSE_WIDTH) < count
    known = out.response_ids, begun.long(), out.rollout_log_probs, -out.response_mask
    rows = dict(zip(BEGUN_RESPONSES, known, strict=True)) | prompts | {"sample_seed": seeds}
    whole = generate_batch(rollout, DataProto.from_dict(rows), sampling, RESPONSE_WIDTH).batch
    assert torch.equal(whole["responses"], out.response_ids)
    assert torch.allclose(whole["rollout_log_probs"], out.rollout_log_probs, atol=TOLERANCE)
    assert torch.equal(whole["token_versions"], -out.response_mask)
    assert not whole["paused"].any()
    # So are those that go on from kept caches, together with rows that have joined.
    valid = prompts["attention_mask"].bool()
    rows = [ids[own].tolist() for ids, own in zip(prompts["input_ids"], valid, strict=True)]
    for row, (ids, log_probs) in enumerate(in_slices(rollout, rows, sampling, 5, keep=8)):
        assert ids == out.response_ids[row, mask[row]].tolist()
        expected = out.rollout_log_probs[row, mask[row]]
        assert torch.allclose(torch.tensor(log_probs), expected, atol=TOLERANCE)
    # Turns behind an observation are equal with and without kept caches.
    sampling = replace(sampling, max_new_tokens=RESPONSE_WIDTH + 8)
    kept, again = (in_turns(rollout, rows, sampling, 5, keep, 2) for keep in (8, 0))
    assert kept[0] == again[0]
    for one, other in zip(kept[1], again[1], strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


def test_every_causal_architecture_of_transformers_is_supported_or_refused():
    known = set(ARCHITECTURES) | {name for names in REFUSED.values() for name in names}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= known
    assert sum(len(names) for names in REFUSED.values()) + len(ARCHITECTURES) == len(known)


REFUSALS = [(name, reason) for reason, names in REFUSED.items() for name in names]


@pytest.mark.parametrize(("model_type", "reason"), REFUSALS)
def test_refusal_names_the_architecture_and_the_reason(model_type, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError) as caught:
        check_model_folder(tmp_path, tokenizer=False)
    assert f"model_type {model_type!r}" in str(caught.value) and reason in str(caught.value)
    with pytest.raises(ModelError):
        build_rollout("hf", ModelConfig(path=str(tmp_path)))


def test_page_has_the_current_tables():
    """`python tests/architectures/document.py` updates the page."""
    text = PAGE.read_text()
    assert text == page_with_tables(text)
