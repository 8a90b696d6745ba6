"""Write settings: as plain values and as YAML, without secrets.

A value that was given as `${oc.env:NAME}` or `${key}` is written as this text, and not as what it
was resolved to. A settings object holds values only, so `remember_given` keeps the texts per key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quadriga.config.secrets import is_secret_name, mask_values, remember_secret

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

# Dotted key → (value, the text that it was resolved from). Not an attribute of the settings object,
# which `dataclasses.replace` would lose.
_interpolated: dict[str, list[tuple[Plain, Plain]]] = {}
_REMEMBERED = 16  # interpolations of one key that are kept, those of the latest loads


def to_plain(config: DataclassInstance) -> dict[str, Plain]:
    """Return settings as nested plain values, with secrets masked and tuples as lists."""
    return mask_values(_values_of(config))


def to_yaml(config: DataclassInstance) -> str:
    """Return all settings as YAML, with secrets masked and interpolations unresolved.

    `load_config(type(config), file=…)` reads it back and returns an equal object in the same
    environment, except for the masked values.
    """
    values = _values_of(config)
    plain = {key: _escaped(value) for key, value in mask_values(values).items()}
    written = OmegaConf.create(plain)
    for key, pairs in _interpolated.items():
        for value, text in pairs:
            if _at(values, key) == value and _gives(value, text, plain, key):
                OmegaConf.update(written, key, text)
    return OmegaConf.to_yaml(written)


def _gives(value: Plain, text: Plain, written: dict[str, Plain], key: str) -> bool:
    """Return whether `text` in place of the value at `key` is read as `value` again.

    Other settings of this process may have had the same value from `${other.key}`, which is another
    value here. A text with a resolver such as `${oc.env:NAME}` is always written: its variable may
    be gone, and the value may be a secret.
    """
    if "${oc." in str(text):
        return True
    settings = OmegaConf.create(written)
    OmegaConf.update(settings, key, text)
    try:
        read = OmegaConf.select(settings, key)
        if OmegaConf.is_config(read):
            read = OmegaConf.to_container(read, resolve=True)
    except OmegaConfBaseException:
        return False
    return bool(read == value)


def remember_given(config: DataclassInstance, given: Mapping[str, Plain]) -> None:
    """Remember the interpolations of the given values, and the values of secret settings."""
    values = _values_of(config)
    for key, value in setting_leaves(values):
        if isinstance(value, str | int) and is_secret_name(key.rpartition(".")[2]):
            remember_secret(str(value))
    for key, text in setting_leaves(dict(given)):
        value = _at(values, key)
        if "${" in str(text) and value is not None:
            pairs = _interpolated.setdefault(key, [])
            pairs.append((value, text))
            del pairs[:-_REMEMBERED]


def _values_of(config: DataclassInstance) -> dict[str, Plain]:
    return {key: _plain(value) for key, value in dataclasses.asdict(config).items()}


def _plain(value: object) -> Plain:
    """Return a value with tuples as lists, the keys of mappings as texts, and other values as text.

    Options that were set in Python can hold any object.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def setting_leaves(value: Plain, key: str = "") -> Iterator[tuple[str, Plain]]:
    """Yield (dotted key, value) for each setting of nested mappings; `key`: of `value` itself."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from setting_leaves(item, f"{key}.{name}" if key else str(name))


def _at(values: Plain, key: str) -> Plain:
    """Return the value at a dotted key, or None."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _escaped(value: Plain) -> Plain:
    """Return plain values in which a `${` of a text is no interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
