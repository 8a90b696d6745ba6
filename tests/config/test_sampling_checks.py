"""The settings of a section `sampling`: each one is read, and each wrong value is refused."""

from dataclasses import replace

import pytest

from quadriga.config.commands import GenerateConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import ModelConfig, SamplingConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.models.tiny import write_tiny_model
from quadriga.rollout.abilities import SamplingParams
from quadriga.trainer.checks.settings import check_generate_settings, check_train_settings
from quadriga.workers.actor_rollout_ref import sampling_params

SAMPLING = "actor_rollout_ref.rollout.sampling"


def load(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, overrides=overrides)


def test_every_setting_reaches_the_engine(tmp_path) -> None:
    write_tiny_model(tmp_path, ["one two three"])
    settings = load(
        f"{SAMPLING}.temperature=0.7", f"{SAMPLING}.top_p=0.9", f"{SAMPLING}.top_k=5",
        f"{SAMPLING}.min_p=0.1", f"{SAMPLING}.min_new_tokens=3", f"{SAMPLING}.ignore_eos=true",
        f"{SAMPLING}.stop=['</answer>', 'Question:']", f"{SAMPLING}.stop_token_ids=[7, 9]",
    ).actor_rollout_ref.rollout.sampling  # fmt: skip
    found = sampling_params(settings, ModelConfig(path=str(tmp_path)), max_new_tokens=8)
    assert found == SamplingParams(
        max_new_tokens=8, eos_token_ids=(1,), pad_token_id=0, temperature=0.7, top_p=0.9, top_k=5,
        min_p=0.1, min_new_tokens=3, ignore_eos=True, stop_token_ids=(7, 9),
        stop_strings=("</answer>", "Question:"),
    )  # fmt: skip
    names = set(vars(SamplingConfig()))
    assert all(getattr(settings, name) != getattr(SamplingConfig(), name) for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, "sampling.top_k=0 must be -1 (all tokens) or at least 1"),
        ({"min_p": 1.5}, "sampling.min_p must be at least 0 and at most 1, got 1.5"),
        ({"min_new_tokens": -1}, "sampling.min_new_tokens must be at least 0, got -1"),
        ({"min_new_tokens": 20}, "max_response_length=16; lower it by 4"),
        ({"stop": ("a", "")}, "sampling.stop=[a,''] has an empty text"),
        ({"stop_token_ids": (3, -2)}, "sampling.stop_token_ids[1] must be at least 0, got -2"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(change, message) -> None:
    config = GenerateConfig(prompt="one", max_response_length=16)
    check_generate_settings(config)
    with pytest.raises(ConfigError) as caught:
        check_generate_settings(replace(config, sampling=replace(config.sampling, **change)))
    assert message in str(caught.value)


@pytest.mark.parametrize("section", ["sampling", "val_sampling"])
def test_training_checks_both_sections(section) -> None:
    key = f"actor_rollout_ref.rollout.{section}"
    config = load("data.train_files=[a.jsonl]", f"{key}.min_new_tokens=513")
    with pytest.raises(ConfigError, match=r"max_response_length=512; lower it by 1") as caught:
        check_train_settings(config)
    assert caught.value.key == f"{key}.min_new_tokens"
