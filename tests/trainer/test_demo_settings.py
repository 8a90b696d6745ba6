"""`quadriga demo`: its commands have settings that fit, and are checked before the first one."""

from pathlib import Path

import pytest

from quadriga.cli.demo import run_demo, train_command
from quadriga.config.commands import DemoConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, InputError
from quadriga.rollout.vllm import options


@pytest.mark.parametrize(
    "overrides", [["backend=local", "n_gpus_per_node=2"], ["n_gpus_per_node=5"]]
)
def test_a_demo_whose_settings_do_not_fit_makes_no_data(tmp_path, overrides) -> None:
    config = load_config(DemoConfig, [f"output={tmp_path / 'demo'}", *overrides])
    with pytest.raises(ConfigError, match="ranks"):
        run_demo(config)
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("rollout", ["vllm", "vlm"])
def test_a_demo_whose_rollout_engine_is_not_there_makes_no_data(tmp_path, monkeypatch, rollout):
    monkeypatch.setattr(options, "installed_version", lambda: None)
    config = load_config(DemoConfig, [f"output={tmp_path / 'demo'}", f"rollout={rollout}"])
    with pytest.raises(InputError, match="vllm") as raised:
        run_demo(config)
    assert raised.value.key == "actor_rollout_ref.rollout.name"
    assert not (tmp_path / "demo").exists()


def test_the_demo_trains_adapters_or_all_weights() -> None:
    for overrides, rank in (([], None), (["lora_rank=32"], 32)):
        command = train_command(load_config(DemoConfig, overrides), Path("demo"))
        policy = load_config(TrainConfig, command.overrides).actor_rollout_ref
        assert policy.model.lora.rank == rank
        assert policy.actor.optim.lr == (3e-4 if rank is None else 3e-3)
