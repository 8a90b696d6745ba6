"""Runs that train adapters or a part of the weights: the reference, exports, resume, the plan."""

import json
import shutil
from pathlib import Path

import pytest
from fine_tuning_cases import six_steps
from peft import PeftModel
from run_cases import metrics_of_run, two_steps
from transformers import AutoModelForCausalLM

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, InputError
from quadriga.trainer.checks.memory import train_plan

LORA = ("actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.actor.optim.lr=1e-2")
KL = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)


@pytest.fixture
def train_overrides(train_overrides, rule):
    """The settings of a run whose rewards differ, although its model is random."""
    return [*train_overrides, rule]


def kl_losses(metrics):
    """Return the KL to the reference in each training step."""
    return [row["actor/kl_loss"] for row in metrics if "actor/kl_loss" in row]


@pytest.fixture(scope="module")
def adapted(tiny_task, rule, tmp_path_factory):
    """The KL to the reference in each step of a run that trains adapters, and its model."""
    folder = tmp_path_factory.mktemp("adapted")
    losses = kl_losses(metrics_of_run([*two_steps(tiny_task, folder), rule, *LORA, *KL]))
    return losses, folder / "run" / "model"


def test_a_run_trains_adapters_against_their_own_base(adapted, tiny_task):
    (first, second), model = adapted
    assert first == pytest.approx(0, abs=1e-9)
    assert second > 1e-6
    config = json.loads((model / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8.0)
    assert config["base_model_name_or_path"] == str(tiny_task.model)
    base = AutoModelForCausalLM.from_pretrained(tiny_task.model)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = AutoModelForCausalLM.from_pretrained(model).state_dict()
    adapter = PeftModel.from_pretrained(base, model / "adapter").merge_and_unload().state_dict()
    for name, weight in merged.items():
        assert adapter[name].sub(weight).abs().max() < 1e-6, name
        assert weight.equal(before[name]) == ("_proj" not in name), name


def test_the_reference_in_the_actor_equals_one_of_its_own(run, adapted):
    apart = ("trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.ref=[1]")
    assert kl_losses(run(*LORA, *KL, *apart)) == pytest.approx(adapted[0], rel=1e-4, abs=1e-9)


def test_a_run_starts_from_an_adapter_and_refuses_that_of_another_base(run, adapted, tmp_path):
    adapter = shutil.copytree(adapted[1] / "adapter", tmp_path / "adapter")
    start = (f"actor_rollout_ref.model.lora.path={adapter}", *KL)
    assert kl_losses(run(*start))[0] > 1e-7  # the reference is the base model
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    with pytest.raises(InputError, match=r"so with rank 8 its lora_A must be \[8, 64\], and the"):
        run(*start, "trainer.overwrite=true")


def test_the_critic_has_adapters_of_its_own(run):
    metrics = run(*LORA, "algorithm.adv_estimator=gae", "critic.model.lora.rank=2")
    assert metrics[-1]["critic/grad_norm"] > 0


def test_the_plan_has_no_second_model_for_the_reference(train_overrides):
    plain = load_config(TrainConfig, [*train_overrides, *KL])
    adapted = load_config(TrainConfig, [*train_overrides, *KL, *LORA])
    for config, roles in ((plain, {"actor", "ref"}), (adapted, {"actor"})):
        (pool,) = train_plan(config, "cpu").pools
        assert set(pool.engines) == roles
    whole, small = (train_plan(c, "cpu").pools[0].engines["actor"] for c in (plain, adapted))
    assert small.held["optimizer states"] < whole.held["optimizer states"] / 3


def test_sft_trains_adapters_and_frozen_weights(tiny_task, tmp_path):
    steps = ("optim.lr=1e-2", "trainer.total_training_steps=2", "data.val_files=[]")
    runs = six_steps("sft", tiny_task, tmp_path)
    result = runs.run("lora", *steps, "model.lora.rank=2")
    assert (Path(result.model_path) / "adapter" / "adapter_model.safetensors").is_file()
    result = runs.run("part", *steps, "model.freeze=[model.embed_tokens.*]")
    before = AutoModelForCausalLM.from_pretrained(tiny_task.model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(result.model_path).state_dict()
    equal = {name for name in before if before[name].equal(after[name])}
    assert equal == {"model.embed_tokens.weight"}
    with pytest.raises(ConfigError, match=r"model\.freeze: no weight"):
        runs.run("none", "model.freeze=[nothing]")
