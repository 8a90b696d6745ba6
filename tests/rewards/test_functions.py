"""Lookup of reward functions: the registry and files of the user."""

from pathlib import Path

import pytest

from quadriga.errors import DataError, InputError
from quadriga.rewards import functions
from quadriga.rewards.functions import (
    load_reward_function,
    register_reward_function,
    reward_function_for,
)

USER_FILE = Path(__file__).with_name("user_rules.py")


def test_a_missing_file_or_function_is_an_error(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_reward_function(tmp_path / "no.py")
    with pytest.raises(InputError, match="did you mean 'by_length'"):
        load_reward_function(USER_FILE, "by_lenght")
    (tmp_path / "rules.txt").write_text("")
    with pytest.raises(DataError, match="not a Python file"):
        load_reward_function(tmp_path / "rules.txt")


def test_a_data_source_can_be_registered_once(monkeypatch):
    monkeypatch.setattr(functions, "FUNCTIONS", dict(functions.FUNCTIONS))
    register_reward_function("mine", str(USER_FILE), "by_length")
    assert reward_function_for("mine").name == "by_length"
    with pytest.raises(InputError, match="already has a reward function"):
        register_reward_function("mine", str(USER_FILE), "by_length")
