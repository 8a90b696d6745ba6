"""Load settings: defaults, a YAML file and dotted overrides → one frozen settings object.

Overrides have Hydra's grammar (`data.train_files=[a,b] algorithm.options.k=4 data.seed=null`), and
`${trainer.project_name}` stands for the value of another setting. Only the parser of Hydra is used:
it makes no run folder, does not change the working directory and does not set up logging.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.convert import (
    build,
    cut,
    holds_text,
    is_free_form,
    is_settings,
    type_of_key,
    unknown_setting,
)
from quadriga.config.paths import expand_home
from quadriga.config.reading import check_interpolations, check_override, read_settings_file
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import is_secret_name, mask_secrets
from quadriga.config.writing import Plain, remember_given, to_plain, to_yaml as to_yaml
from quadriga.errors import ConfigError, UnknownSettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def load_config(cls: type[T], overrides: Iterable[str] = (), file: str | Path | None = None) -> T:
    """Return the settings of `cls`: defaults, then `file` (YAML), then `overrides`; the last wins.

    Raises:
        UnknownSettingError: a key does not exist; the message names the nearest one.
        ConfigError: a value is of the wrong type, or an override or the file cannot be read.
    """
    tree = OmegaConf.create({})
    if file is not None:
        values = read_settings_file(Path(expand_home(file)))
        if "${" not in str(values):
            # The file is built by itself first, so that the message of an error in it begins with
            # its name. A `${…}` in it may refer to an override, so it is checked only at the end.
            build(cls, values, f"{file}: ")
        tree = OmegaConf.create(values)
    parser = OverridesParser.create()
    for text in overrides:
        _apply(tree, cls, _parse(parser, cls, text))
    given = _container(tree)
    config = build(cls, _resolve(cls, tree, given))
    remember_given(config, given)
    return config


def given_user_files(overrides: Iterable[str], file: str | Path | None = None) -> list[str]:
    """Return `algorithm.user_files` as a file and overrides give it; [] if they do not.

    These files can add sections of settings, so keys that do not exist are left to `load_config`,
    which is called when all sections are known.

    Raises:
        ConfigError: the setting is no list of texts, or an override or the file cannot be read.
    """
    tree = OmegaConf.create({} if file is None else read_settings_file(Path(expand_home(file))))
    parser = OverridesParser.create()
    for text in overrides:
        try:
            change = _parse(parser, TrainConfig, text)
            _apply(tree, TrainConfig, change)
        except UnknownSettingError:
            continue
    section = _container(tree).get("algorithm")
    if not isinstance(section, dict) or "user_files" not in section:
        return []
    values = {"user_files": section["user_files"]}
    if "${" in str(values):  # of the other values only those that it refers to are resolved
        values = _resolved_at(TrainConfig, tree, "algorithm.user_files")
    return build(TrainConfig, {"algorithm": values}).algorithm.user_files


def _container(tree: DictConfig) -> dict[str, Plain]:
    """Return the given values as plain values, with interpolations unresolved."""
    plain = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@dataclasses.dataclass(frozen=True)
class _Change:
    """One parsed override: set `key` to `value`."""

    key: str
    value: object


def _parse(parser: OverridesParser, cls: type, text: str) -> _Change:
    """Parse one override.

    Hydra's grammar decides on the type of a value without knowing the setting, so a setting that
    holds text keeps the raw text unless Hydra read a text, null or a list:

        override                Hydra reads       value of the setting
        data.seed=7             7                 7
        prompt=7                7                 "7"
        prompt=1e-3             0.001             "1e-3"
        prompt=a, b             two sweep values  "a, b"
        prompt=it's 4           a syntax error    "it's 4"
        prompt='a b'            "a b"             "a b"  (quotes removed)
        prompt=null             None              None
        data.val_files=~/a      a syntax error    "~/a"
    """
    key, sign, raw = text.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not key or text.startswith("~"):
        raise ConfigError(f"expected key=value, got {cut(repr(text))}", key=key)
    check_override(text, cut(key))
    is_text = holds_text(type_of_key(cls, key))
    try:
        value = _value(parser.parse_override(text), raw)
    except (HydraException, RecursionError, ValueError) as error:
        if is_text or raw.startswith("~"):  # one path of a list needs no quotes either
            return _Change(key, raw)
        if is_secret_name(key.rpartition(".")[2]):
            raise ConfigError(f"cannot read the value of {key}; quote it", key=key) from None
        reason = mask_secrets(str(error).splitlines()[0])
        hint = "; quote a path with ~ in a list: ['~/a.parquet']" if "~" in raw else ""
        raise ConfigError(
            f"cannot read the value of {cut(repr(text))}: {cut(reason)}{hint}", key=key
        ) from None
    if is_text and not isinstance(value, str | None | list):
        return _Change(key, raw)
    return _Change(key, value)


def _value(parsed: Override, raw: str) -> object:
    if parsed.is_sweep_override():
        raise HydraException(f"a run takes one value, not several; write a list as [{raw}]")
    return parsed.value()


def _apply(tree: DictConfig, cls: type, change: _Change) -> None:
    """Set one key in the tree of values that are given so far.

    A mapping is merged into a section (`sampling={top_p: 0.9}` leaves `sampling.temperature`), but
    it replaces a setting that holds free-form options.
    """
    kind = type_of_key(cls, change.key)
    if change.value is None and is_settings(kind):
        raise ConfigError(
            f"{change.key} is a section of settings and cannot be null", key=change.key
        )
    merge = isinstance(change.value, dict) and not is_free_form(kind)
    try:
        OmegaConf.update(tree, change.key, change.value, merge=merge, force_add=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot set {change.key}: {reason}", key=change.key) from None


def _resolve(
    cls: type[DataclassInstance], tree: DictConfig, given: dict[str, Plain]
) -> dict[str, Plain]:
    """Return the given values with each `${key}` replaced by its value.

    `${key}` may refer to a setting that is not given, so the defaults are merged in before values
    are resolved. Without a `${…}` this merge is skipped: only given values need to be checked.
    """
    if "${" not in str(given):
        return given
    check_interpolations(given)
    defaults = OmegaConf.create(to_plain(cls()))
    try:
        plain = OmegaConf.to_container(OmegaConf.merge(defaults, tree), resolve=True)
    except OmegaConfBaseException as error:
        raise _unresolved(cls, error) from None
    except RecursionError:
        raise ConfigError("cannot resolve a setting: it refers to itself") from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _resolved_at(cls: type[DataclassInstance], tree: DictConfig, key: str) -> dict[str, Plain]:
    """Return the last part of a key → its value, with each `${key}` in it replaced."""
    check_interpolations(_container(tree))
    merged = OmegaConf.merge(OmegaConf.create(to_plain(cls())), tree)
    name = key.rpartition(".")[2]
    try:
        value = OmegaConf.create({name: OmegaConf.select(merged, key)}, parent=merged)
        plain = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        raise _unresolved(cls, error) from None
    except RecursionError:
        raise ConfigError("cannot resolve a setting: it refers to itself") from None
    assert isinstance(plain, dict)
    return {str(name): value for name, value in plain.items()}


def _unresolved(cls: type, error: OmegaConfBaseException) -> ConfigError:
    reason = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '([^']+)'", reason)
    if missing:
        return unknown_setting(cls, missing.group(1), f"cannot resolve ${{{missing.group(1)}}}: ")
    return ConfigError(f"cannot resolve a setting: {reason}", key=str(error.full_key or ""))
