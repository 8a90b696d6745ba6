"""Read settings from the configuration objects of verl."""

from __future__ import annotations

from typing import Any, TypeAlias, overload

VerlConfig: TypeAlias = object
"""A mapping, an OmegaConf node or an object with attributes; None: no settings."""


def setting(config: VerlConfig, key: str, default: object = None) -> Any:
    """Return `config[key]` or `config.key`; `default` if the setting is missing or None."""
    if config is None:
        return default
    getter = getattr(config, "get", None)
    found = getter(key, default) if getter is not None else getattr(config, key, default)
    return default if found is None else found


@overload
def number(config: VerlConfig, key: str, default: float) -> float: ...
@overload
def number(config: VerlConfig, key: str, default: None = None) -> float | None: ...


def number(config: VerlConfig, key: str, default: float | None = None) -> float | None:
    """Return a setting as a float; `default` if it is missing or None."""
    found = setting(config, key, default)
    return None if found is None else float(found)
