"""Settings that offload to host memory have no effect on a CPU, and one warning says so."""

from __future__ import annotations

import logging

import pytest

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.checks.engines import warn_of_offloads
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.preflight import check_rm_config, check_sft_config

ACTOR = "actor_rollout_ref.actor.engine"
TURNS = "actor_rollout_ref.rollout.take_turns"


@pytest.fixture
def warnings(caplog):
    """`warnings()` returns the warnings about offloading, each with the settings that it names."""
    caplog.set_level(logging.WARNING)

    def found() -> list[set[str]]:
        texts = [record.getMessage() for record in caplog.records]
        return [
            set(text.partition("of the host: ")[2].split(", "))
            for text in texts
            if text.startswith("without effect, because the ranks compute on the CPU")
        ]

    return found


def test_a_run_on_a_cpu_names_all_of_them_once(train_overrides, warnings):
    given = {f"{ACTOR}.param_offload=true", f"{ACTOR}.optimizer_offload=true", f"{TURNS}=true"}
    config = load_config(TrainConfig, [*train_overrides, "trainer.device=cpu", *given])
    RayPPOTrainer(config).close()
    assert warnings() == [given]


def test_a_run_without_them_says_nothing(train_overrides, warnings):
    RayPPOTrainer(load_config(TrainConfig, [*train_overrides, "trainer.device=cpu"])).close()
    assert warnings() == []


@pytest.mark.parametrize(
    ("kind", "check"), [(SFTConfig, check_sft_config), (RMConfig, check_rm_config)]
)
def test_the_checks_of_fine_tuning_say_it(kind, check, tiny_task, tmp_path, warnings):
    given = "engine.optimizer_offload=true"
    check(
        load_config(
            kind,
            [
                f"model.path={tiny_task.model}", f"data.train_files={tiny_task.data('sft')}",
                f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.device=cpu", given,
            ],
        )
    )  # fmt: skip
    assert warnings() == [{given}]


@pytest.mark.parametrize("kind", [SFTConfig, RMConfig])
@pytest.mark.parametrize("name", ["param_offload", "optimizer_offload", "offload_policy"])
def test_each_setting_is_named_on_a_cpu_only(kind, name, warnings):
    given = f"engine.{name}=true"
    warn_of_offloads(load_config(kind, ["trainer.device=cpu", given]))
    assert warnings() == [{given}]
    warn_of_offloads(load_config(kind, ["trainer.device=cuda", given]))
    assert len(warnings()) == 1


def test_a_role_that_the_run_has_not_is_not_named(warnings):
    run = ["trainer.device=cpu", "algorithm.adv_estimator=grpo", f"{ACTOR}.param_offload=true"]
    warn_of_offloads(load_config(TrainConfig, [*run, "critic.engine.param_offload=true"]))
    assert warnings() == [{f"{ACTOR}.param_offload=true"}]
