"""Secrets do not reach files, logs and messages: by their names, their values and their forms."""

import json
import logging
import os
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
import torch

from processes import run_python
from quadriga.cli.main import main
from quadriga.config import secrets
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import is_secret_name, mask_logs, mask_secrets, mask_values
from quadriga.errors import ConfigError, DataError
from quadriga.observability.console import RunConsole
from quadriga.observability.jsonl import JsonlFile, Sample
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.trackers import RunInfo, Trackers, register_tracker
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager

VALUE = "s3cr3t-v4lue"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    monkeypatch.setenv("MY_FOLDER", "shared-folder")
    monkeypatch.setattr(secrets, "_values_of_settings", set())


# Settings


def test_values_of_variables_are_not_written(tmp_path):
    config = load_config(
        TrainConfig,
        [
            "trainer.default_local_dir=runs/${oc.env:MY_FOLDER}/a",
            "+algorithm.options.note='${oc.env:WANDB_API_KEY}'",
            "data.train_files=['${oc.env:MY_FOLDER}/a.parquet']",
            "trainer.experiment_name='${trainer.project_name}-1'",
        ],
    )
    assert config.trainer.default_local_dir == "runs/shared-folder/a"
    assert config.algorithm.options["note"] == VALUE
    folder = RunFolder.open(tmp_path / "run", config)
    text = folder.config.read_text()
    assert VALUE not in text and "shared-folder" not in text
    assert "default_local_dir: runs/${oc.env:MY_FOLDER}/a" in text
    assert "experiment_name: ${trainer.project_name}-1" in text
    assert load_config(TrainConfig, file=folder.config) == config


def test_print_config_does_not_write_values_of_variables(capsys):
    assert main(["train", "trainer.project_name=${oc.env:MY_FOLDER}", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "shared-folder" not in shown and "project_name: ${oc.env:MY_FOLDER}" in shown


def test_a_text_that_looks_like_an_interpolation_is_read_back(tmp_path):
    options = {"pattern": "a${b}"}
    config = TrainConfig()
    config.algorithm.options.update(options)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(TrainConfig, file=tmp_path / "c.yaml").algorithm.options == options


@pytest.mark.parametrize(
    "name",
    ["token", "hub_token", "HF_TOKEN", "apiKey", "api-key", "x.api_key", "APIKEY", "openaiApiKey",
     "password", "db_passwd", "PWD_2", "passphrase", "client_secret", "clientSecret", "credentials",
     "aws_secret_access_key", "access_key_id", "private_key", "ssh_key", "authorization", "auth",
     "cookie", "bearer", "jwt", "sentry_dsn", "webhook_url", "connection_string", "token_value",
     "signing_key", "SlackWebhook", "DB_PASSWORD1", "api_keys", "passwords", "GITHUB_PAT"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["prompt_key", "response_key", "max_tokens_per_micro_batch", "tokens", "tokenizer_path", "key",
     "experiment_name", "author", "total_steps", "passes", "secretary", "keyword", "monkey"],
)  # fmt: skip
def test_names_of_ordinary_settings(name):
    assert not is_secret_name(name)


def test_a_secret_setting_is_masked_by_name_and_its_value_everywhere():
    config = load_config(
        TrainConfig,
        [
            "+algorithm.options.judge.apiKey=k3y-of-judge",
            "+algorithm.options.urls=[x-k3y-of-judge]",
        ],
    )
    text = to_yaml(config)
    assert "k3y-of-judge" not in text and text.count("***") == 2
    assert mask_secrets("called with k3y-of-judge") == "called with ***"


def test_values_in_nested_containers_are_masked():
    value = {"a": [{"Authorization": "Basic abc"}, f"x{VALUE}y"], "n": 3}
    assert mask_values(value) == {"a": [{"Authorization": "***"}, "x***y"], "n": 3}


def test_numbers_are_masked_by_name():
    value = {"db_password": 12345678, "api_key": [123456789], "pad_token": 0, "auth": True}
    masked = {"db_password": "***", "api_key": ["***"], "pad_token": 0, "auth": True}
    assert mask_values(value) == masked and "***" not in to_yaml(TrainConfig())
    config = load_config(TrainConfig, ["+algorithm.options.db_password=12345678"])
    assert "12345678" not in to_yaml(config)
    assert mask_secrets("called with 12345678") == "called with ***"


# Text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"key {VALUE}.", "key ***."),
        ("postgres://ann:pass@host/db", "postgres://***@host/db"),
        ("https://ann:p@ss:w@host/x", "https://***@host/x"),
        ("https://example.org/a?b=c@d", "https://example.org/a?b=c@d"),
        ("hf_" + "a1B2" * 8, "***"),
        ("sk-proj-" + "a1B2" * 8, "***"),
        ("ghp_" + "a1B2" * 9, "***"),
        ("AKIA" + "ABCD" * 4, "***"),
        ("Bearer eyJ" + "a" * 20 + ".eyJ" + "b" * 20 + "." + "c" * 20, "Bearer ***"),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\nx", "***\nx"),
        ("half a sk-tart, hf_ub and a ghost", "half a sk-tart, hf_ub and a ghost"),
    ],
)
def test_secrets_in_text(text, masked):
    assert mask_secrets(text) == masked


def test_variables_that_are_no_secrets_are_not_masked(monkeypatch):
    monkeypatch.setenv("PWD", "workfolder")
    monkeypatch.setenv("SHORT_TOKEN", "1")
    monkeypatch.setenv("CREDENTIALS", "/run/credentials.json")
    text = "workfolder 1 /run/credentials.json shared-folder"
    assert mask_secrets(text) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_SECRET_ACCESS_KEY", "/x7bKqLm+NoPq/RsTu"), ("OPENAI_KEY", "a1b2c3d4e5f6g7h8")],
)
def test_variables_with_the_value_of_a_secret_are_masked(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert mask_secrets(f"key {value}.") == "key ***."


@pytest.mark.parametrize("write", [repr, json.dumps, ascii])
def test_secrets_are_masked_in_quoted_text(monkeypatch, write):
    monkeypatch.setenv("DB_PASSWORD", 'pa"ss\\wo\nrdé')
    assert "ss" not in mask_secrets(write(os.environ["DB_PASSWORD"]))


def test_the_search_for_keys_takes_time_in_proportion_to_the_text():
    # At each of the million marks, the search must not read the text to its end: it would take
    # hours.
    text = "eyJ-" * 1_000_000
    assert mask_secrets(text) == text


# Errors


def test_errors_of_the_command_line_are_masked(replace_training, capsys):
    error = DataError(f"cannot read https://u:{VALUE}@host/a")
    replace_training(mock.Mock(side_effect=error))
    assert main(["train"]) == 2
    assert VALUE not in capsys.readouterr().err


def test_tracebacks_of_unexpected_errors_are_masked(replace_training, capsys):
    replace_training(mock.Mock(side_effect=ZeroDivisionError(f"with {VALUE}")))
    assert main(["train"]) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: with ***" in shown and "Traceback" in shown


@pytest.mark.parametrize(
    "override",
    ["data.seed=${oc.env:WANDB_API_KEY}", "trainer.backend=${oc.env:WANDB_API_KEY}",
     f"data.train_batch_size={VALUE}", f"+algorithm.options.password=[{VALUE[:4]}-other"],
)  # fmt: skip
def test_errors_of_settings_do_not_show_secrets(override):
    with pytest.raises(ConfigError) as caught:
        load_config(TrainConfig, [override])
    assert VALUE[:6] not in str(caught.value)


# Logs


def test_log_records_are_masked(monkeypatch, caplog):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    log = logging.getLogger("quadriga.test_secrets")
    mask_logs()
    log.warning("token %s", VALUE)
    try:
        raise ValueError(f"bad {VALUE}")
    except ValueError:
        log.exception("failed")
    log.warning("%d of %d", 1, 2)
    assert "token ***" in caplog.text and "ValueError: bad ***" in caplog.text
    assert "1 of 2" in caplog.text and VALUE not in caplog.text


def test_the_command_line_masks_logs():
    code = (
        "import logging; from quadriga.observability.quiet import silence_libraries;"
        "silence_libraries(); logging.getLogger('x').warning('key %s', 'tok-9876')"
    )
    done = run_python("-c", code, env={"API_TOKEN": "tok-9876", "PATH": "/usr/bin"})
    assert done.stderr == "key ***\n"


def test_failures_of_reward_functions_are_masked(caplog):
    def rule(**_):
        raise ConnectionError(f"401 with {VALUE}")

    class Letters:
        def batch_decode(self, rows, skip_special_tokens):
            return ["x"] * len(rows)

    ids = torch.ones(1, 1, dtype=torch.int64)
    arrays = {"extra_info": np.array([None], dtype=object)}
    manager = RewardManager(Letters(), rule)
    manager(DataProto.from_dict({"responses": ids, "response_mask": ids}, arrays))
    assert manager.failures[0].detail == "ConnectionError: 401 with ***"
    assert VALUE not in caplog.text


# Files and trackers


def test_samples_are_masked(tmp_path):
    sample = Sample(1, "train", f"a {VALUE}", f"b {VALUE}", 1.0, {"x": [VALUE]})
    JsonlFile(tmp_path / "samples.jsonl").write(asdict(sample))
    text = (tmp_path / "samples.jsonl").read_text()
    assert VALUE not in text and text.count("***") == 3


def test_trackers_receive_no_secrets(tmp_path, monkeypatch):
    seen = []

    class Mine:
        def __init__(self, run):
            seen.append(run.title)

        def log(self, step, metrics):
            seen.append(metrics)

        def close(self):
            pass

    monkeypatch.setattr("quadriga.observability.trackers.TRACKERS", {})
    register_tracker("mine", Mine)
    trackers = Trackers.open(["mine"], RunInfo(RunFolder(tmp_path), 1, title=f"t {VALUE}"))
    trackers.log(1, {f"reward/extra/{VALUE}": 1.0, "reward/mean": 2.0})
    trackers.close()
    assert seen == ["t ***", {"reward/extra/***": 1.0, "reward/mean": 2.0}]


def test_the_console_shows_no_secrets(capsys):
    console = RunConsole(1)
    console.note(f"note {VALUE}")
    console.table("end", [("folder", VALUE)])
    shown = capsys.readouterr().out
    assert VALUE not in shown and shown.count("***") == 2
