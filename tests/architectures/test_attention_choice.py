"""Models that have no SDPA attention load with the default setting and say which one they use."""

import logging

import pytest
from small_models import small_model

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.attention.kernels import ATTENTION_NAME
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


NO_EFFECT = (
    "attn_implementation=eager of the model in {folder} has no effect in this engine, because it "
    "packs rows; engine.attention=auto chooses their kernel"
)


@pytest.mark.parametrize(
    ("model_type", "settings", "attention", "message"),
    [
        ("gemma2", {"packed": False}, "eager", "attn_implementation=sdpa; using eager"),
        ("qwen2", {"packed": False}, "sdpa", None),
        ("gemma2", {}, ATTENTION_NAME, None),
        ("qwen2", {}, ATTENTION_NAME, None),
        ("qwen2", {"attn_implementation": "eager"}, ATTENTION_NAME, NO_EFFECT),
        ("qwen2", {"attn_implementation": "eager", "head": "value"}, ATTENTION_NAME, NO_EFFECT),
        ("qwen2", {"attn_implementation": "eager", "packed": False}, "eager", None),
    ],
)
def test_an_engine_says_if_it_has_another_attention_than_the_settings(
    model_type, settings, attention, message, tmp_path, caplog
):
    small_model(model_type).save_pretrained(tmp_path)
    of_engine = {name: settings[name] for name in settings.keys() & {"packed", "head"}}
    of_model = {name: settings[name] for name in settings.keys() - of_engine.keys()}
    with caplog.at_level(logging.INFO):
        engine = FSDPEngine(
            ModelConfig(path=str(tmp_path), **of_model), EngineConfig(), **of_engine
        )
    messages = [record.getMessage() for record in caplog.records]
    assert not any("loads the whole model" in message for message in messages)
    found = [text for text in messages if "attn_implementation" in text]
    expected = [] if message is None else [message.format(folder=tmp_path)]
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True))
    assert engine.module.config._attn_implementation == attention
