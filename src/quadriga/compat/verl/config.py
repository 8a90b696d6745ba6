"""Read settings from the configuration objects of verl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, overload

from quadriga.errors import ConfigError

VerlConfig: TypeAlias = object
"""A mapping, an OmegaConf node or an object with attributes; None: no settings."""
_NO_SECTION: Final = (int, float, Sequence)  # a text is a sequence, and so is a list of OmegaConf


def setting(config: VerlConfig, key: str, default: object = None) -> Any:
    """Return `config[key]` or `config.key`; `default` if the setting is missing or None.

    Raises `ConfigError` if `config` is a single value or a list, which has no settings.
    """
    if config is None:
        return default
    if isinstance(config, _NO_SECTION):
        raise ConfigError(f"expected a section of settings with {key!r}, got {config!r}", key=key)
    getter = getattr(config, "get", None)
    found = getter(key, default) if getter is not None else getattr(config, key, default)
    return default if found is None else found


@overload
def number(config: VerlConfig, key: str, default: float) -> float: ...
@overload
def number(config: VerlConfig, key: str, default: None = None) -> float | None: ...


def number(config: VerlConfig, key: str, default: float | None = None) -> float | None:
    """Return a setting as a float; `default` if it is missing or None.

    Raises `ConfigError` for a value that is no number.
    """
    found = setting(config, key, default)
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError):
        raise ConfigError(f"{key} must be a number, got {found!r}", key=key) from None
