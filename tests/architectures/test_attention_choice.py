"""Models that have no SDPA attention load with the default setting and say which one they use."""

from __future__ import annotations

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


def warnings_of_an_engine(caplog, folder, *, packed=None, head="lm", **settings):
    """What an engine that loads by shards says about its attention, and the attention it has."""
    with caplog.at_level(logging.INFO):
        model = ModelConfig(path=str(folder), **settings)
        engine = FSDPEngine(model, EngineConfig(), packed=packed, head=head)
    assert not any("loads the whole model" in r.getMessage() for r in caplog.records)
    messages = [r.getMessage() for r in caplog.records if "attn_implementation" in r.getMessage()]
    return messages, engine.module.config._attn_implementation


@pytest.mark.parametrize(("model_type", "used"), [("gemma2", "eager"), ("qwen2", "sdpa")])
def test_an_engine_that_loads_by_shards_says_so_too(model_type, used, tmp_path, caplog):
    small_model(model_type).save_pretrained(tmp_path)
    messages, attention = warnings_of_an_engine(caplog, tmp_path, packed=False)
    assert attention == used
    expected = f"attn_implementation=sdpa; using {used}"
    assert [expected in message for message in messages] == [True] * (used != "sdpa")


@pytest.mark.parametrize("model_type", ["gemma2", "qwen2"])
def test_packed_rows_have_their_own_attention(model_type, tmp_path, caplog):
    small_model(model_type).save_pretrained(tmp_path)
    assert warnings_of_an_engine(caplog, tmp_path) == ([], ATTENTION_NAME)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_named_attention_without_effect_is_told_once(head, tmp_path, caplog):
    small_model("qwen2").save_pretrained(tmp_path)
    messages, attention = warnings_of_an_engine(
        caplog, tmp_path, head=head, attn_implementation="eager"
    )
    assert attention == ATTENTION_NAME
    assert messages == [
        f"attn_implementation=eager of the model in {tmp_path} has no effect in this engine, "
        "because it packs rows; engine.attention=auto chooses their kernel"
    ]


def test_a_named_attention_is_used_for_padded_rows(tmp_path, caplog):
    small_model("qwen2").save_pretrained(tmp_path)
    found = warnings_of_an_engine(caplog, tmp_path, packed=False, attn_implementation="eager")
    assert found == ([], "eager")
