"""The fused head and full KL to a reference give the gradients of the naive form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import engine_cases as cases
import head_cases
import pytest
import torch
from head_cases import HeadCase
from transformers import AutoConfig, AutoModelForCausalLM

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import ConfigError


@pytest.fixture(scope="module")
def expected(folders):
    return {tied: head_cases.naive(folders, tied=tied) for tied in (True, False)}


def check(found, expected) -> None:
    (gradients, metrics), (naive, kl) = found, expected
    assert gradients.keys() == naive.keys()
    for name, gradient in naive.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((gradients[name] - gradient).abs().max() / scale) < 2e-6, name
    assert metrics["kl"] == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize("case", head_cases.ONE_RANK, ids=str)
def test_head_gradients_on_one_rank(folders, expected, case):
    check(head_cases.gradients(case, folders, cases.make_batch()), expected[case.tied])


@pytest.mark.parametrize("case", head_cases.TWO_RANKS, ids=str)
def test_head_gradients_on_two_ranks(two_ranks, expected, case):
    check(two_ranks["heads"][case], expected[case.tied])


def test_fused_head_never_returns_all_logits(folders, monkeypatch):
    """The output layer returns targets × vocabulary logits, the fused head three columns."""
    monkeypatch.setattr("quadriga.models.log_probs.CPU_TILE", 64)
    monkeypatch.setattr("quadriga.models.log_probs._CPU_CHUNK", 64)
    largest = {}
    for fused in (True, False):
        case = HeadCase(packed=True, fused=fused)
        policy, reference = (
            head_cases.engine(folder, case, fused=fused, frozen=frozen, dtype="float32")
            for folder, frozen in ((folders.policy, False), (folders.reference, True))
        )
        vocabulary = policy.module.config.vocab_size
        targets = int(cases.make_batch()["response_mask"].sum())
        sizes: list[int] = []
        layer = policy.module.get_output_embeddings()
        layer.register_forward_hook(lambda m, i, out, sizes=sizes: sizes.append(out.numel()))
        policy.train_step(cases.make_batch(), head_cases.loss, entropy=True, reference=reference)
        largest[fused] = max(sizes)
    assert largest == {True: 3 * targets, False: targets * vocabulary}


@pytest.fixture
def scaled(tmp_path, model_folder):
    """A small Granite model, which divides its logits after the output layer."""
    config = AutoConfig.for_model(
        "granite", vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, logits_scaling=4.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in Path(model_folder).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    return str(tmp_path)


def test_model_that_scales_its_logits_cannot_use_the_fused_head(scaled, monkeypatch):
    with pytest.raises(ConfigError, match=r"fused_head=true: Granite\w+ changes its logits after"):
        FSDPEngine(ModelConfig(path=scaled), EngineConfig(fused_head=True), OptimConfig())
    monkeypatch.setattr("quadriga.engines.token_model.MIN_FUSED_LOGITS", 1)
    engine = FSDPEngine(ModelConfig(path=scaled), EngineConfig(), OptimConfig())
    assert not engine._token_model.fused
    batch = cases.make_batch()
    found = engine.forward(batch)["log_probs"][0, 0]
    model, (prompt, response) = AutoModelForCausalLM.from_pretrained(scaled), cases.LENGTHS[0]
    ids = batch["input_ids"][0, cases.P - prompt : cases.P + response]
    log_p = model(ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, log_p[prompt - 1, ids[prompt]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "fused"), [(16384, False), (2**30, True)], ids=["few logits", "many logits"]
)
def test_fused_head_is_used_by_default_for_many_logits(model_folder, tokens, fused):
    settings = EngineConfig(max_tokens_per_micro_batch=tokens)
    engine = FSDPEngine(ModelConfig(path=model_folder), settings, OptimConfig())
    vocabulary = json.loads((Path(model_folder) / "config.json").read_text())["vocab_size"]
    assert (tokens * vocabulary >= 2**26) is fused
    assert engine._token_model.fused is fused
