"""Load settings: defaults, a YAML file and dotted overrides → one frozen settings object.

Overrides have Hydra's grammar (`data.train_files=[a,b] algorithm.options.k=4 data.seed=null`), and
`${trainer.project_name}` stands for the value of another setting. Only the parser of Hydra is used:
it makes no run folder, does not change the working directory and does not set up logging.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quadriga.config.convert import build, type_of_key, unknown_setting
from quadriga.config.setting_types import holds_text, is_free_form, is_settings
from quadriga.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
# Ends of keys whose values must not be written: `hub_token`, but not `max_tokens_per_micro_batch`.
_SECRET = re.compile(r"(^|_)(token|password|secret|api_key|access_key)$")
MASK = "***"


def load_config(cls: type[T], overrides: Iterable[str] = (), file: str | Path | None = None) -> T:
    """Return the settings of `cls`: defaults, then `file` (YAML), then `overrides`; the last wins.

    Raises:
        UnknownSettingError: a key does not exist; the message names the nearest one.
        ConfigError: a value is of the wrong type, or an override or the file cannot be read.
    """
    tree = OmegaConf.create({})
    if file is not None:
        values = _read_file(Path(file))
        if "${" not in str(values):
            # The file is built by itself first, so that the message of an error in it begins with
            # its name. A `${…}` in it may refer to an override, so it is checked only at the end.
            build(cls, values, f"{file}: ")
        tree = OmegaConf.create(values)
    parser = OverridesParser.create()
    for text in overrides:
        _apply(tree, cls, _parse(parser, cls, text))
    return build(cls, _resolve(cls, tree))


def to_plain(config: DataclassInstance) -> dict[str, object]:
    """Return settings as nested plain values, with secrets masked and tuples as lists."""
    return {key: _plain(value, key) for key, value in dataclasses.asdict(config).items()}


def to_yaml(config: DataclassInstance) -> str:
    """Return all settings as YAML, with secrets masked.

    `load_config(type(config), file=…)` reads it back and returns an equal object, except for the
    masked values.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def _plain(value: object, name: str) -> object:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, name) for v in value]
    return MASK if isinstance(value, str) and _SECRET.search(name) else value


def _read_file(path: Path) -> dict[str, object]:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"no settings file {path}", key="--config") from None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read settings file {path}: {reason}", key="--config") from None
    values = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` settings, got a list", key="--config")
    return {str(key): value for key, value in values.items()}


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
    """
    key, sign, raw = text.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not key or text.startswith("~"):
        raise ConfigError(f"expected key=value, got {text!r}", key=key)
    is_text = holds_text(type_of_key(cls, key))
    try:
        value = _value(parser.parse_override(text), raw)
    except HydraException as error:
        if is_text:
            return _Change(key, raw)
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot read the value of {text!r}: {reason}", key=key) from None
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


def _resolve(cls: type[DataclassInstance], tree: DictConfig) -> dict[str, object]:
    """Return the given values as plain values, with each `${key}` replaced by its value.

    `${key}` may refer to a setting that is not given, so the defaults are merged in before values
    are resolved. Without a `${…}` this merge is skipped: only given values need to be checked.
    """
    if "${" not in str(OmegaConf.to_container(tree, resolve=False)):
        plain = OmegaConf.to_container(tree, resolve=False)
    else:
        defaults = OmegaConf.create(to_plain(cls()))
        try:
            plain = OmegaConf.to_container(OmegaConf.merge(defaults, tree), resolve=True)
        except OmegaConfBaseException as error:
            raise _unresolved(cls, error) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _unresolved(cls: type, error: OmegaConfBaseException) -> ConfigError:
    reason = str(error).splitlines()[0]
    missing = re.search(r"Interpolation key '([^']+)'", reason)
    if missing:
        return unknown_setting(cls, missing.group(1), f"cannot resolve ${{{missing.group(1)}}}: ")
    return ConfigError(f"cannot resolve a setting: {reason}", key=str(error.full_key or ""))
