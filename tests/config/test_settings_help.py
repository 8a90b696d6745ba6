"""`--help` shows every setting of the schema with type, default and comment."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from quadriga.config.commands import (
    AlgorithmsConfig,
    ArithmeticDataConfig,
    DemoConfig,
    EvalConfig,
    GenerateConfig,
    SFTConfig,
)
from quadriga.config.convert import as_written, help_text, settings_of, walk_keys
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig

SCHEMAS = (TrainConfig, SFTConfig, GenerateConfig, EvalConfig, ArithmeticDataConfig, DemoConfig)


@dataclass(frozen=True)
class Inner:
    rate: float = 1e-6  # learning rate


@dataclass(frozen=True)
class Outer:
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    seed: int | None = None  # None: random
    # a comment above
    # the setting
    mode: Literal["a", "b"] | None = "a"
    inner: Inner = field(default_factory=lambda: Inner(rate=0.5))


def test_help_shows_keys_types_defaults_and_comments():
    assert help_text(Outer()).splitlines() == [
        "  names=[a,b]  (a list of texts)",
        "  seed=null  (an integer or null; null: random)",
        "  mode=a  (one of a, b or null; a comment above the setting)",
        "",
        "  inner.rate=0.5  (a number; learning rate)",
    ]


@pytest.mark.parametrize("cls", SCHEMAS)
def test_every_setting_is_listed_once(cls):
    listed = [setting.key for setting in settings_of(cls())]
    keys = {key for key, _ in walk_keys(cls)}
    sections = {key.rpartition(".")[0] for key in keys}
    assert set(listed) == keys - sections
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("cls", (*SCHEMAS, AlgorithmsConfig))
def test_every_setting_has_a_meaning(cls):
    assert [setting.key for setting in settings_of(cls()) if not setting.meaning] == []


@pytest.mark.parametrize("cls", SCHEMAS)
def test_defaults_are_shown_in_the_form_of_overrides(cls):
    overrides = [f"{s.key}={s.default}" for s in settings_of(cls()) if s.default]
    assert load_config(cls, overrides) == cls()


def test_values_are_shown_as_written_on_the_command_line():
    assert as_written({"a": [1, True, None]}) == "{a:[1,true,null]}"
