"""Finding reward functions: the table, and a user's own file."""

from pathlib import Path

import pytest

from quadriga.errors import DataError, InputError, UnknownNameError
from quadriga.rewards import functions
from quadriga.rewards.functions import (
    load_reward_function,
    register_reward_function,
    reward_function_for,
)

USER_FILE = Path(__file__).with_name("user_rules.py")


def test_known_sources_have_a_rule():
    rule = reward_function_for("quadriga/arithmetic").load()
    assert rule("quadriga/arithmetic", "#### 3", "3", None) == 1.0


def test_unknown_source_names_the_nearest():
    with pytest.raises(UnknownNameError, match="openai/gsm") as caught:
        reward_function_for("openai/gsm8")
    assert caught.value.nearest == "openai/gsm8k"


def test_users_function_is_found_by_file_and_name():
    function = load_reward_function(USER_FILE, "by_length").load()
    assert function("x", "a12", None) == {"score": 3.0, "digits": 2}


def test_missing_file_and_missing_name(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_reward_function(tmp_path / "no.py")
    with pytest.raises(InputError, match="did you mean 'by_length'"):
        load_reward_function(USER_FILE, "by_lenght")
    (tmp_path / "rules.txt").write_text("")
    with pytest.raises(DataError, match="not a Python file"):
        load_reward_function(tmp_path / "rules.txt")


def test_function_must_take_the_four_arguments():
    with pytest.raises(InputError, match="must take data_source, solution_str"):
        load_reward_function(USER_FILE, "too_few")


@pytest.mark.parametrize("text", ["def compute_score(:\n", "raise ValueError('x')\n", "exit(1)\n"])
def test_file_that_does_not_import_is_an_input_error(tmp_path, text):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(InputError, match="does not import"):
        load_reward_function(path)


def test_registering_a_source(monkeypatch):
    monkeypatch.setattr(functions, "FUNCTIONS", dict(functions.FUNCTIONS))
    register_reward_function("mine", str(USER_FILE), "by_length")
    assert reward_function_for("mine").name == "by_length"
    with pytest.raises(InputError, match="scored already"):
        register_reward_function("mine", str(USER_FILE), "by_length")
