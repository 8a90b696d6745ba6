"""`load_config` combines defaults, a file and overrides in one typed, frozen object."""

import dataclasses
from operator import attrgetter

import pytest

from quadriga.config.commands import GenerateConfig, SFTConfig
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import OptimConfig, TrainConfig
from quadriga.errors import ConfigError, UnknownSettingError

ARR = "actor_rollout_ref"


def load(*overrides, file=None):
    return load_config(TrainConfig, overrides, file)


def test_overrides_set_values_of_every_type_at_every_level():
    values = {
        "algorithm.adv_estimator=grpo": "grpo",
        "trainer.n_gpus_per_node=2": 2,
        "actor_rollout_ref.actor.optim.lr=3e-4": 3e-4,
        "data.train_files=[a.parquet,b.parquet]": ["a.parquet", "b.parquet"],
        "actor_rollout_ref.actor.optim.betas=[0.8,0.95]": (0.8, 0.95),
        "data.filter_overlong_prompts=false": False,
        "critic.model.gradient_checkpointing=selective": "selective",
        "trainer.total_training_steps=7": 7,
    }
    config = load(*values)
    found = {given: attrgetter(given.partition("=")[0])(config) for given in values}
    assert found == values and isinstance(config.actor_rollout_ref.actor.optim, OptimConfig)


def test_other_settings_of_a_section_keep_the_defaults_of_that_section():
    config = load("critic.optim.weight_decay=0", "actor_rollout_ref.rollout.val_sampling.top_k=5")
    assert config.critic.optim.lr == 1e-5  # the default of OptimConfig is 1e-6
    assert config.actor_rollout_ref.rollout.val_sampling.temperature == 0.0


def test_integers_are_accepted_as_numbers_but_not_numbers_as_integers():
    assert load("algorithm.gamma=1").algorithm.gamma == 1.0
    with pytest.raises(ConfigError, match=r"must be an integer, got 64\.5"):
        load("data.train_batch_size=64.5")


def test_null_is_accepted_only_by_optional_settings():
    assert load("data.seed=3", "data.seed=null").data.seed is None
    with pytest.raises(ConfigError, match=r"train_batch_size must be an integer, got null"):
        load("data.train_batch_size=null")


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_options_accept_any_keys(sign):
    config = load(f"{sign}algorithm.options.k=4", "algorithm.options.deep.er=[1,2]")
    assert config.algorithm.options == {"k": 4, "deep": {"er": [1, 2]}}


def test_a_mapping_is_merged_into_a_section():
    config = load("actor_rollout_ref.rollout.sampling={temperature: 0.5}")
    assert config.actor_rollout_ref.rollout.sampling.temperature == 0.5
    assert config.actor_rollout_ref.rollout.sampling.top_p == 1.0


def test_a_reference_to_an_unknown_setting_names_the_nearest():
    message = r"\$\{trainer\.sed\}: no setting trainer\.sed; did you mean trainer\.seed"
    with pytest.raises(UnknownSettingError, match=message):
        load("data.seed=${trainer.sed}")


@pytest.mark.parametrize(
    "text", ["Anna has 3 apples, and it's 4 more. How many?", "3 + 4", "1e-3", "a, b", "007", "{x}"]
)
def test_text_settings_keep_the_raw_text_after_the_equals_sign(text):
    assert load_config(GenerateConfig, [f"prompt={text}"]).prompt == text


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.adv_estimater=gae", "algorithm.adv_estimator"),
        ("train_batch_size=3", "data.train_batch_size"),
        ("actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("+trainer.n_gpu_per_node=1", "trainer.n_gpus_per_node"),
        ("data.seed.x=1", "data.seed"),
        ("optim.lr=1", "actor_rollout_ref.actor.optim.lr"),
        (f"{ARR}.rollout.temperature=1", f"{ARR}.rollout.sampling.temperature"),
        (f"{ARR}.actor.fsdp_config.fsdp_size=1", f"{ARR}.actor.engine.fsdp_size"),
        (f"{ARR}.rollout.tensor_model_parallel_size=2", f"{ARR}.ref.engine.tensor_parallel_size"),
        ("xyzzy=1", None),
    ],
)
def test_unknown_key_names_the_nearest(override, nearest):
    with pytest.raises(UnknownSettingError) as caught:
        load(override)
    assert caught.value.nearest == nearest
    assert "\n" not in str(caught.value)
    if nearest:
        assert f"did you mean {nearest}?" in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=abc", "train_batch_size must be an integer, got the text 'abc'"),
        ("data.train_batch_size=true", "data.train_batch_size must be an integer, got true"),
        ("data.shuffle=1", "data.shuffle must be true or false, got 1"),
        ("data.seed=x", "data.seed must be an integer or null, got the text 'x'"),
        ("critic.optim.betas=[0.5]", "betas must be a list of 2 numbers, got [0.5]"),
        ("data.train_files=[1]", "data.train_files[0] must be text, got 1"),
        ("algorithm.options=3", "algorithm.options must be a mapping, got 3"),
        ("data=null", "data is a section of settings and cannot be null"),
        ("data=3", "data must be a section of settings, got 3"),
        ("trainer.project_name=[a]", "trainer.project_name must be text, got ['a']"),
        ("data.seed", "expected key=value, got 'data.seed'"),
        ("~data.seed", "expected key=value, got '~data.seed'"),
        ("data.seed=1,2", "a run takes one value, not several; write a list as [1,2]"),
        ("data.seed=[1", "cannot read the value of 'data.seed=[1'"),
        ("critic.model.gradient_checkpointing=1", "must be one of true, false, selective, got 1"),
        ("critic.model.gradient_checkpointing=x", "must be one of true, false, selective, got"),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key_the_expected_type_and_the_value(override, message):
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data:\n  seed: 4\n  max_prompt_length: 9\ncritic:\n  optim: {lr: 2e-5}\n")
    config = load("data.seed=5", file=file)
    assert (config.data.seed, config.data.max_prompt_length) == (5, 9)
    assert config.critic.optim.lr == 2e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {sede: 1}\n", "run.yaml: no setting data.sede; did you mean data.seed?"),
        ("data: {seed: x}\n", "run.yaml: data.seed must be an integer or null"),
        ("- 1\n", "must hold `key: value` settings, got a list"),
        ("a: [\n", "cannot read settings file"),
        (None, "no settings file "),
    ],
)
def test_errors_in_a_file_name_the_file(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert message in str(caught.value) and "run.yaml" in str(caught.value)


@pytest.mark.parametrize("cls", [TrainConfig, SFTConfig, GenerateConfig])
def test_defaults_survive_a_yaml_round_trip(cls, tmp_path):
    config = dataclasses.replace(cls())
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(cls, file=file) == config


def test_a_reference_of_other_settings_is_not_written(tmp_path):
    """Both have data.seed=5; in the second, ${trainer.seed} is 0."""
    referring, plain = load("trainer.seed=5", "data.seed=${trainer.seed}"), load("data.seed=5")
    file = tmp_path / "settings.yaml"
    for config, written in ((referring, "${trainer.seed}"), (plain, "5")):
        file.write_text(to_yaml(config))
        assert load(file=file) == config
        assert f"seed: {written}\n" in file.read_text()
