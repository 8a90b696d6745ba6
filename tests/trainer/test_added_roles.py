"""Roles of users: settings, ranks, start order, stages, metrics, checkpoints, death."""

from pathlib import Path

import pytest
import torch
from role_cases import write_tally
from run_cases import STREAMED, timeless
from safetensors.torch import load_file

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import CheckpointError, ConfigError, WorkerDiedError
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.main import run_training
from quadriga.trainer.roles.registry import load_train_config

APART = ("trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.tally=[1]")
RAY = ("trainer.backend=ray", "trainer.num_cpus=2", "trainer.device=cpu")


@pytest.fixture
def tally(tmp_path, own_roles) -> str:
    return write_tally(tmp_path)


@pytest.fixture
def run_roles(train_overrides, tally):
    """run_roles("a=b", …) trains with the role `tally` and returns the metrics of each step."""

    def _run(*more: str) -> list[dict[str, float]]:
        config = load_train_config([*train_overrides, tally, *more])
        run_training(config)
        return list(read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl"))

    return _run


# Settings.


def test_a_role_has_a_section_with_types_and_ranks(tally) -> None:
    config = load_train_config([tally, "tally.weight=2", "tally.kind=long", "placement.tally=[0]"])
    assert isinstance(config, TrainConfig)
    assert (config.tally.weight, config.tally.kind) == (2.0, "long")
    assert config.placement.tally == [0]
    defaults = load_train_config([tally])
    assert (defaults.tally.weight, defaults.placement.tally) == (1.0, None)


def test_a_section_may_refer_to_other_settings_and_be_referred_to(tally) -> None:
    config = load_train_config([tally, "tally.weight=4", "algorithm.gamma=0.5",
                                "tally.dies_at='${data.train_batch_size}'",
                                "algorithm.lam='${algorithm.gamma}'"])  # fmt: skip
    assert (config.tally.dies_at, config.algorithm.lam) == (64, 0.5)
    user_files = tally.replace("tally.py", "${trainer.experiment_name}.py").replace("=[", "=['")
    referred = [user_files.replace("]", "']"), "trainer.experiment_name=tally", "tally.weight=1"]
    assert load_train_config(referred).tally.weight == 1.0


# Runs.


def test_a_role_computes_the_same_on_shared_and_on_own_ranks(run_roles, run) -> None:
    together = timeless(run_roles())
    assert [row["tally/seen"] for row in together[1:]] == [16.0, 32.0]
    assert together[1]["tally/bonus"] > 1
    apart = timeless(run_roles(*APART, "trainer.overwrite=true"))
    assert apart == together
    without = timeless(run("trainer.overwrite=true"))
    assert without[1]["reward/mean"] != together[1]["reward/mean"]


def lines(path: Path, *, first: int) -> list[dict[str, object]]:
    return timeless([row for row in read_jsonl(path) if row["step"] >= first])


@pytest.mark.parametrize(
    "more",
    [(), STREAMED, pytest.param((*APART, *RAY), marks=pytest.mark.nightly)],
    ids=["local", "streamed", "ray"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(run_roles, tmp_path, more) -> None:
    settings = [*more, "trainer.total_training_steps=4", "trainer.save_freq=2"]
    whole, resumed = tmp_path / "run", tmp_path / "resumed"
    run_roles(*settings)
    half = whole / "checkpoints" / "global_step_2"
    run_roles(*settings, f"trainer.resume_mode={half}", f"trainer.default_local_dir={resumed}")
    assert lines(resumed / "metrics.jsonl", first=0) == lines(whole / "metrics.jsonl", first=3)
    last = "checkpoints/global_step_4/tally/tally_0.safetensors"
    assert load_file(whole / last)["seen"].item() == 64
    assert torch.equal(load_file(whole / last)["seen"], load_file(resumed / last)["seen"])
    if more is STREAMED:
        refill = "algorithm.filter_groups={enable: true, mode: refill}"
        with pytest.raises(ConfigError, match=r"add_bonus runs on the batch .*refill need"):
            run_roles(*more, refill)


def test_a_checkpoint_without_the_state_of_a_role_is_refused(run, run_roles, tmp_path) -> None:
    run("trainer.save_freq=1")
    half = tmp_path / "run" / "checkpoints" / "global_step_1"
    with pytest.raises(CheckpointError, match="has no state of role tally, whose workers save one"):
        run_roles(f"trainer.resume_mode={half}", f"trainer.default_local_dir={tmp_path / 'other'}")


@pytest.mark.nightly
def test_a_role_that_dies_ends_the_run_with_its_name(run_roles) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run_roles(*APART, *RAY, "tally.dies_at=16", "trainer.max_restarts=1")
    assert (caught.value.role, caught.value.method) == ("tally", "add_bonus")
    assert "tally" in str(caught.value).splitlines()[0]
    assert "The first of these losses: The process of tally rank 0" in str(caught.value)


def test_settings_that_lack_a_registered_role_are_refused(train_overrides, tally) -> None:
    config = load_config(TrainConfig, [*train_overrides, tally])
    with pytest.raises(ConfigError, match=r"role tally of .*tally\.py is registered, but these"):
        run_training(config)
