"""Every path is of this machine, and a `~` at its beginning is the home folder for all readers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from quadriga import models
from quadriga.algorithms.user_files import load_user_file
from quadriga.checkpoint import folders, shards
from quadriga.checkpoint.hf_export import export_hf
from quadriga.cli.main import COMMANDS, PLANNED, main
from quadriga.config.commands import EvalConfig, SFTConfig
from quadriga.config.convert import is_settings, walk_keys
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.paths import PathSettings, absolute_paths, local_path
from quadriga.config.schema import (
    AlgorithmConfig,
    DataConfig,
    DatasetClassConfig,
    ModelConfig,
    RewardConfig,
    SamplerConfig,
    TrainConfig,
    TrainerConfig,
)
from quadriga.data.arithmetic import write_arithmetic
from quadriga.data.rows import read_rows
from quadriga.errors import ConfigError, DataError
from quadriga.observability.jsonl import JsonlFile, read_jsonl
from quadriga.observability.run_folder import RunFolder
from quadriga.protocol import DataProto
from quadriga.rewards.functions import load_reward_function
from quadriga.trainer.checkpoints import inputs_of
from quadriga.trainer.evaluation import rows_of
from quadriga.trainer.preflight import check_files

SETTINGS = tuple({*PLANNED.values(), *(c.settings for c in COMMANDS if c.settings is not None)})
NAMES_A_PATH = re.compile(r"(path|file|files|dir|folder|output|images)$")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def sections(cls: type) -> set[type]:
    return {cls, *(kind for _, kind in walk_keys(cls) if is_settings(kind))}


@pytest.mark.parametrize(
    "cls", sorted(set().union(*map(sections, SETTINGS)), key=lambda c: c.__name__)
)
def test_every_setting_with_the_name_of_a_path_is_one(cls):
    texts = {field.name for field in dataclasses.fields(cls) if "str" in str(field.type)}
    named = {name for name in texts if NAMES_A_PATH.search(name)}
    paths = {*cls.PATHS, *cls.KEPT} if issubclass(cls, PathSettings) else set()
    assert named <= paths <= texts | {"parts"}
    for name in paths:
        for scheme in ("hdfs", "s3", "gs", "https", "file", *([] if cls.ON_HUB else ["hf"])):
            remote = f"{scheme}://host/x"
            for given in ({"own": {"path": remote}},) if name == "parts" else (remote, [remote]):
                with pytest.raises(ConfigError, match=f"{name}={remote} is not on this machine"):
                    cls(**{name: given})


@pytest.mark.parametrize(
    ("cls", "given", "key"),
    [
        (TrainConfig, "trainer.default_local_dir=~/x", "trainer.default_local_dir"),
        (TrainConfig, "actor_rollout_ref.model.lora.path=~/x", "actor_rollout_ref.model.lora.path"),
        (SFTConfig, "reward.path=~/x", "reward.path"),
        (EvalConfig, "output=~/x", "output"),
    ],
)
def test_one_path_from_the_command_line_and_from_a_file(home, cls, given, key):
    (home / "settings.yaml").write_text("")
    config = load_config(cls, [given], "~/settings.yaml")
    found = config
    for name in key.split("."):
        found = getattr(found, name)
    assert found == str(home / "x")
    (home / "settings.yaml").write_text(to_yaml(config))
    assert load_config(cls, file="~/settings.yaml") == config


def test_lists_of_paths_and_the_parts_of_the_reward(home):
    config = load_config(
        TrainConfig,
        [
            "data.train_files=['~/a.parquet',b.parquet]", "algorithm.user_files=['~/mine.py']",
            "reward.parts={own: {path: '~/rule.py', name: '~f'}, exact: {weight: 1.0}}",
        ],
    )  # fmt: skip
    assert config.data.train_files == [str(home / "a.parquet"), "b.parquet"]
    assert config.algorithm.user_files == [str(home / "mine.py")]
    own = {"path": str(home / "rule.py"), "name": "~f"}
    assert config.reward.parts == {"own": own, "exact": {"weight": 1.0}}
    one = load_config(TrainConfig, ["data.train_files=~/a.parquet"]).data.train_files
    assert one == [str(home / "a.parquet")]
    with pytest.raises(ConfigError, match=r"at: '~'; quote a path with ~ in a list: \['~/a"):
        load_config(TrainConfig, ["data.train_files=[~/a.parquet]"])


def test_names_that_are_no_paths_of_the_home_folder_stay(tmp_path):
    for path in ("hf://owner/~name", "a/~/b", "", "~no such user/b", "a:/b", "./exp:/b"):
        assert ModelConfig(path=path).path == path
        assert local_path(path, hub=True) == path
    assert TrainerConfig(resume_mode="auto").resume_mode == "auto"
    assert absolute_paths(ModelConfig(path="hf://owner/~name")).path == "hf://owner/~name"
    with pytest.raises(DataError, match=r"data\.train_files: no such file: ~no such user/a"):
        check_files(DataConfig(train_files=["~no such user/a"]).train_files, "data.train_files",
                    needed=True)  # fmt: skip


def test_a_remote_path_is_refused_before_anything_starts(home, capsys):
    for given, message in (
        ("trainer.default_local_dir=hdfs://ns/x", ""),
        ("trainer.resume_mode=s3://b/x", ""),
        ("actor_rollout_ref.model.path=gs://b/x", "or mount gs://, and give that path"),
        ("data.train_files=[a.parquet,s3://b/x]", "data.train_files=s3://b/x"),
        ("reward.path=file:///a.py", "write a path without file://"),
        ("trainer.default_local_dir=s3://me:password@b/x", "=s3://***@b/x is not"),
    ):
        assert main(["train", given]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {given.partition('=')[0]}=") and message in printed
    assert list(Path().iterdir()) == []
    (home / "run.yaml").write_text("trainer: {default_local_dir: hdfs://ns/x}")
    with pytest.raises(ConfigError, match=r"run.yaml: trainer.default_local_dir=hdfs:") as caught:
        load_config(TrainConfig, file="~/run.yaml")
    assert caught.value.key == "trainer.default_local_dir"


@pytest.mark.parametrize("remote", ["s3://b/x", Path("s3://b/x")])
def test_a_function_refuses_a_remote_path(home, remote):
    for call in (
        DataProto.from_dict({"x": torch.ones(1)}).save_to_disk, DataProto.load_from_disk,
        lambda path: load_config(TrainConfig, file=path), lambda path: next(read_jsonl(path)),
        JsonlFile, lambda path: RunFolder.open(path, TrainConfig()), rows_of,
        lambda path: folders.begin_checkpoint(path, 1), folders.complete_checkpoints,
        folders.read_marker, folders.verify_checkpoint, shards.read_scalars,
        lambda path: shards.save_rank_state(path, {}, {}, rank=0, world_size=1),
        lambda path: shards.load_rank_state(path, {}, rank=0),
        lambda path: models.write_tiny_model(path, ["a"]), write_arithmetic,
        models.check_model_folder, models.load_tokenizer, load_user_file, load_reward_function,
        lambda path: read_rows([path]), lambda path: export_hf(path, [], None),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"s3://?b/x is not on this machine"):
            call(remote)
    assert list(Path().iterdir()) == []


def test_a_changed_file_of_the_home_folder_is_a_change_for_a_resumed_run(home):
    keys = {
        "data.py": "content of data.train_files",
        "rule.py": "content of reward.path",
        "part.py": "content of reward.parts",
        "set.py": "content of data.dataset.path",
        "order.py": "content of data.sampler.path",
        "mine.py": "content of algorithm.user_files",
    }
    for name in keys:
        (home / name).write_text("first")
    config = TrainConfig(
        data=DataConfig(
            train_files=["~/data.py"],
            dataset=DatasetClassConfig(path="~/set.py"),
            sampler=SamplerConfig(path="~/order.py"),
        ),
        reward=RewardConfig(path="~/rule.py", parts={"own": {"path": "~/part.py"}}),
        algorithm=AlgorithmConfig(user_files=["~/mine.py"]),
    )
    for name, key in keys.items():
        before = inputs_of(config)
        (home / name).write_text("second")
        after = inputs_of(config)
        assert [own for own in before if before[own] != after[own]] == [key]
