"""A `~` at the beginning of a path is the home folder, in every setting and for every reader."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quadriga.cli.main import COMMANDS, PLANNED
from quadriga.config.commands import EvalConfig, SFTConfig
from quadriga.config.convert import is_settings, walk_keys
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.paths import PathSettings, absolute_paths, expand_home
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
from quadriga.errors import ConfigError, DataError
from quadriga.trainer.checkpoints import inputs_of
from quadriga.trainer.preflight import check_files

SETTINGS = tuple({*PLANNED.values(), *(c.settings for c in COMMANDS if c.settings is not None)})
NAMES_A_PATH = re.compile(r"(path|file|files|dir|folder|output|images)$")
# The default of `cache_dir` must fit every user who reads a settings file that another has written,
# so it is replaced where the folder is used.
REPLACED_WHERE_IT_IS_USED = {"cache_dir"}


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
    named = {name for name in texts if NAMES_A_PATH.search(name)} - REPLACED_WHERE_IT_IS_USED
    paths = set(cls.PATHS) if issubclass(cls, PathSettings) else set()
    assert named <= paths <= texts | {"parts"}


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
    for path in ("hf://owner/~name", "a/~/b", "", "~no such user/b", "https://h/~u"):
        assert ModelConfig(path=path).path == path
        assert expand_home(path) == path
    assert TrainerConfig(resume_mode="auto").resume_mode == "auto"
    assert absolute_paths(ModelConfig(path="hf://owner/~name")).path == "hf://owner/~name"
    with pytest.raises(DataError, match=r"data\.train_files: no such file: ~no such user/a"):
        check_files(DataConfig(train_files=["~no such user/a"]).train_files, "data.train_files",
                    needed=True)  # fmt: skip


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
