"""From defaults, a YAML file and dotted overrides to one frozen settings object.

The overrides follow Hydra's grammar (`data.train_files=[a,b] algorithm.options.k=4 data.seed=null`)
and are read by Hydra's own parser; `${trainer.project_name}` refers to another setting. Hydra runs
nothing here: no run folder, no change of directory, no logging set-up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from quadriga.config.convert import build, is_free_form, type_of_key, unknown_setting
from quadriga.errors import ConfigError

T = TypeVar("T")
_SECRET = re.compile(r"(^|_)(token|password|secret|api_key|access_key)$")
MASK = "***"


def load_config(cls: type[T], overrides: Iterable[str] = (), file: str | Path | None = None) -> T:
    """The settings of `cls`: its defaults, then `file` (YAML), then `overrides`, later ones win.

    Raises `UnknownSettingError` (a key that does not exist; names the nearest) and `ConfigError`
    (a value of the wrong type, an override or a file that cannot be read).
    """
    tree = OmegaConf.create({})
    if file is not None:
        values = _read_file(Path(file))
        if "${" not in str(values):
            build(cls, values, f"{file}: ")  # so that a mistake in it is reported with its name
        tree = OmegaConf.create(values)
    parser = OverridesParser.create()
    for text in overrides:
        _apply(tree, cls, _parse(parser, cls, text))
    return build(cls, _resolve(cls, tree))


def to_plain(config: Any) -> dict[str, Any]:
    """A settings object as nested plain values with secrets masked. Tuples become lists."""
    plain = _plain(dataclasses.asdict(config))
    assert isinstance(plain, dict)
    return plain


def to_yaml(config: Any) -> str:
    """A settings object as YAML, every setting of it, with secrets masked.

    `load_config(type(config), file=…)` gives the same object back, masked values aside.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, name) for v in value]
    return MASK if isinstance(value, str) and _SECRET.search(name) else value


def _read_file(path: Path) -> dict[str, Any]:
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
    """One override, read: set `key` to `value`."""

    key: str
    value: Any


def _parse(parser: OverridesParser, cls: type, text: str) -> _Change:
    """Read one override. A setting that holds text takes what follows `=` as it stands."""
    key, sign, raw = text.partition("=")
    key = key.lstrip("+").strip()
    if not sign or not key or text.startswith("~"):
        raise ConfigError(f"expected key=value, got {text!r}", key=key)
    kind = type_of_key(cls, key)
    holds_text = kind in (str, str | None)
    try:
        parsed = parser.parse_override(text)
        value = _value(parsed, raw)
    except HydraException as error:
        if holds_text:
            return _Change(key, raw)
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot read the value of {text!r}: {reason}", key=key) from None
    if holds_text and not isinstance(value, str | None | list):
        return _Change(key, raw)
    return _Change(key, value)


def _value(parsed: Override, raw: str) -> Any:
    if parsed.is_sweep_override():
        raise HydraException(f"several values; one run takes one, and a list is [{raw}]")
    return parsed.value()


def _apply(tree: DictConfig, cls: type, change: _Change) -> None:
    if change.value is not None or not _is_section(cls, change.key):
        merge = isinstance(change.value, dict) and not is_free_form(type_of_key(cls, change.key))
        try:
            OmegaConf.update(tree, change.key, change.value, merge=merge, force_add=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"cannot set {change.key}: {reason}", key=change.key) from None
        return
    raise ConfigError(f"{change.key} is a section of settings and cannot be null", key=change.key)


def _is_section(cls: type, key: str) -> bool:
    return dataclasses.is_dataclass(type_of_key(cls, key))


def _resolve(cls: type, tree: DictConfig) -> dict[str, Any]:
    """Plain values, with `${key}` replaced by what that key holds, defaults included."""
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
        return unknown_setting(cls, missing.group(1), "${…} names ")
    return ConfigError(f"cannot resolve a setting: {reason}", key=str(error.full_key or ""))
