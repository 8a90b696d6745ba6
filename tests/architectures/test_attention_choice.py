"""Models that have no SDPA attention load with the default setting and say which one they use."""

from __future__ import annotations

import logging

import pytest
from small_models import small_model

from quadriga.models import load_causal_lm


@pytest.mark.parametrize(
    ("model_type", "used"),
    [("gemma2", "eager"), ("gpt_oss", "eager"), ("bloom", "eager"), ("qwen2", "sdpa")],
)
def test_default_attention_is_the_one_that_the_model_supports(model_type, used, tmp_path, caplog):
    small_model(model_type).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load_causal_lm(tmp_path)
    assert model.config._attn_implementation == used
    messages = [r.getMessage() for r in caplog.records if r.name == "quadriga.models.loading"]
    expected = f"does not support attn_implementation=sdpa; using {used}"
    assert [expected in message for message in messages] == [True] * (used != "sdpa")
