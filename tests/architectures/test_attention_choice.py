"""Models that have no SDPA attention load with the default setting and say which one they use."""

from __future__ import annotations

import logging

import pytest
from small_models import small_model

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models import load_causal_lm

LOADING = "quadriga.models.loading"


@pytest.mark.parametrize(
    ("model_type", "used"),
    [("gemma2", "eager"), ("gpt_oss", "eager"), ("bloom", "eager"), ("qwen2", "sdpa")],
)
def test_default_attention_is_the_one_that_the_model_supports(model_type, used, tmp_path, caplog):
    small_model(model_type).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load_causal_lm(tmp_path)
    assert model.config._attn_implementation == used
    messages = [r.getMessage() for r in caplog.records if r.name == LOADING]
    expected = f"does not support attn_implementation=sdpa; using {used}"
    assert [expected in message for message in messages] == [True] * (used != "sdpa")


@pytest.mark.parametrize(("model_type", "used"), [("gemma2", "eager"), ("qwen2", None)])
def test_an_engine_that_loads_by_shards_says_so_too(model_type, used, tmp_path, caplog):
    small_model(model_type).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        FSDPEngine(ModelConfig(path=str(tmp_path)), EngineConfig())
    assert not any("loads the whole model" in r.getMessage() for r in caplog.records)
    messages = [r.getMessage() for r in caplog.records if r.name == LOADING]
    assert [f"attn_implementation=sdpa; using {used}" in message for message in messages] == (
        [True] if used else []
    )
