"""Every path is of this machine, and a `~` at its beginning is the home folder for all readers."""

import dataclasses
import importlib
import inspect
import operator
import re
from pathlib import Path

import fsspec
import pytest

from quadriga.cli.main import COMMANDS, PLANNED, main
from quadriga.config import schema
from quadriga.config.commands import EvalConfig, SFTConfig
from quadriga.config.convert import is_settings, walk_keys
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.paths import PathSettings, absolute_paths, local_path
from quadriga.errors import ConfigError, DataError
from quadriga.trainer.checkpoints import inputs_of
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
    fsspec.get_filesystem_class("https")  # what another part of the program has used
    texts = {field.name for field in dataclasses.fields(cls) if "str" in str(field.type)}
    named = {name for name in texts if NAMES_A_PATH.search(name)}
    paths = {*cls.PATHS, *cls.KEPT} if issubclass(cls, PathSettings) else set()
    assert named <= paths <= texts | {"parts"}
    for name in paths:
        allowed = ["s3", "hdfs", "hf"] if name in getattr(cls, "REMOTE", ()) else []
        for scheme in ("hdfs", "s3", "gs", "https", "file", *([] if cls.ON_HUB else ["hf"])):
            remote = f"{scheme}://host/x"
            text = f"{name}={remote}(: | is not on this machine)"
            for given in ({"own": {"path": remote}},) if name == "parts" else (remote, [remote]):
                if scheme in allowed:
                    assert getattr(cls(**{name: given}), name) == given
                    continue
                with pytest.raises(ConfigError, match=text):
                    cls(**{name: given})


@pytest.mark.parametrize(
    ("cls", "given", "key"),
    [
        (schema.TrainConfig, "trainer.default_local_dir=~/x", "trainer.default_local_dir"),
        (
            schema.TrainConfig,
            "actor_rollout_ref.model.lora.path=~/x",
            "actor_rollout_ref.model.lora.path",
        ),
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
        schema.TrainConfig,
        [
            "data.train_files=['~/a.parquet',b.parquet]", "algorithm.user_files=['~/mine.py']",
            "reward.parts={own: {path: '~/rule.py', name: '~f'}, exact: {weight: 1.0}}",
        ],
    )  # fmt: skip
    assert config.data.train_files == [str(home / "a.parquet"), "b.parquet"]
    assert config.algorithm.user_files == [str(home / "mine.py")]
    own = {"path": str(home / "rule.py"), "name": "~f"}
    assert config.reward.parts == {"own": own, "exact": {"weight": 1.0}}
    one = load_config(schema.TrainConfig, ["data.train_files=~/a.parquet"]).data.train_files
    assert one == [str(home / "a.parquet")]
    with pytest.raises(ConfigError, match=r"at: '~'; quote a path with ~ in a list: \['~/a"):
        load_config(schema.TrainConfig, ["data.train_files=[~/a.parquet]"])


def test_names_that_are_no_paths_of_the_home_folder_stay(tmp_path):
    for path in ("hf://owner/~name", "a/~/b", "", "~no such user/b", "a:/b", "./exp:/b"):
        assert schema.ModelConfig(path=path).path == path
        assert local_path(path, hub=True) == path
    assert schema.TrainerConfig(resume_mode="auto").resume_mode == "auto"
    assert absolute_paths(schema.ModelConfig(path="hf://owner/~name")).path == "hf://owner/~name"
    files = schema.DataConfig(train_files=["~no such user/a"]).train_files
    with pytest.raises(DataError, match=r"data\.train_files: no such file: ~no such user/a"):
        check_files(files, "data.train_files", needed=True)


def test_a_remote_path_is_refused_before_anything_starts(home, capsys):
    for given, message in (
        ("trainer.default_local_dir=hdfs://ns/x", ""),
        ("trainer.resume_mode=s3://b/x", ""),
        ("reward.path=gs://b/x", "or mount gs://, and give that path"),
        ("actor_rollout_ref.model.path=az://b/x", "needs the package adlfs: pip install adlfs"),
        ("data.train_files=[a.parquet,x3://b/x]", "data.train_files=x3://b/x: no file system"),
        ("reward.path=file://host/a.py", "write a path without file://"),
        ("trainer.default_local_dir=s3://me:password@b/x", "=s3://***@b/x is not"),
    ):
        assert main(["train", given]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {given.partition('=')[0]}=") and message in printed
    assert list(Path().iterdir()) == []
    (home / "run.yaml").write_text("trainer: {default_local_dir: hdfs://ns/x}")
    with pytest.raises(ConfigError, match=r"run.yaml: trainer.default_local_dir=hdfs:") as caught:
        load_config(schema.TrainConfig, file="~/run.yaml")
    assert caught.value.key == "trainer.default_local_dir"


FUNCTIONS = {
    "algorithms.user_files": ["load_user_file"],
    "checkpoint.folders": [
        "begin_checkpoint", "complete_checkpoints", "read_marker", "verify_checkpoint",
    ],
    "checkpoint.hf_export": ["export_hf"],
    "checkpoint.shards": ["read_scalars", "load_rank_state"],
    "data.arithmetic": ["write_arithmetic"],
    "models": ["write_tiny_model"],
    "observability.jsonl": ["JsonlFile"],
    "observability.run_folder": ["RunFolder.open"],
    "protocol.disk": ["load", "save"],
    "rewards.functions": ["load_reward_function"],
    "trainer.evaluation": ["rows_of"],
}  # fmt: skip


@pytest.mark.parametrize("remote", ["s3://b/x", Path("s3://b/x")])
def test_a_function_refuses_a_remote_path(home, remote):
    given = {"step": 1, "weights": [], "config": None, "texts": ["a"], "tensors": {}, "rank": 0}
    for module, name in ((place, name) for place, names in FUNCTIONS.items() for name in names):
        function = operator.attrgetter(name)(importlib.import_module(f"quadriga.{module}"))
        needed = inspect.signature(function).parameters
        more = {key: value for key, value in given.items() if key in needed}
        contents = [(None, {}, {})] if name == "save" else []
        with pytest.raises(ConfigError, match=r"s3://?b/x is not on this machine"):
            function(*contents, remote, **more)
    assert list(Path().iterdir()) == []


def test_a_changed_file_of_the_home_folder_is_a_change_for_a_resumed_run(home):
    keys = {
        "data.py": "content of data.train_files",
        "rule.py": "content of reward.path",
        "part.py": "content of reward.parts",
        "game.py": "content of agent.path",
        "set.py": "content of data.dataset.path",
        "order.py": "content of data.sampler.path",
        "mine.py": "content of algorithm.user_files",
    }
    for name in keys:
        (home / name).write_text("first")
    config = schema.TrainConfig(
        data=schema.DataConfig(
            train_files=["~/data.py"],
            dataset=schema.DatasetClassConfig(path="~/set.py"),
            sampler=schema.SamplerConfig(path="~/order.py"),
        ),
        reward=schema.RewardConfig(path="~/rule.py", parts={"own": {"path": "~/part.py"}}),
        algorithm=schema.AlgorithmConfig(user_files=["~/mine.py"]),
        agent=schema.AgentConfig(path="~/game.py"),
    )
    for name, key in keys.items():
        before = inputs_of(config)
        (home / name).write_text("second")
        after = inputs_of(config)
        assert [own for own in before if before[own] != after[own]] == [key]
