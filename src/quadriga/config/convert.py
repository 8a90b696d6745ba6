"""Convert plain values to settings objects, and check keys and types on the way.

`build(TrainConfig, {"data": {"seed": 3}})` returns a frozen `TrainConfig`; its sections are frozen
dataclasses too. Types are checked strictly: `true` and `1.5` are not integers, and the text "3" is
not a number. The only conversion is from an integer to a float.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from quadriga.config.secrets import mask_secrets
from quadriga.config.setting_types import (
    ANYTHING,
    allows_none,
    choices_of,
    field_types,
    is_free_form,
    is_settings,
    is_switch,
    is_union,
    switch_names,
    type_name,
    without_none,
)
from quadriga.errors import ConfigError, UnknownSettingError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
MAX_SHOWN = 200  # characters of a key or a value in a message
NEAR = 0.7  # smallest similarity of the last parts of two keys for a "did you mean"


def walk_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, type) for every setting of a class, sections included."""
    for name, kind in field_types(cls).items():
        key = f"{prefix}{name}"
        yield key, kind
        if is_settings(kind):
            yield from walk_keys(kind, f"{key}.")


def type_of_key(cls: type, key: str) -> object:
    """Return the type of a dotted key; `ANYTHING` for a key below free-form options.

    Raises `UnknownSettingError` if there is no such key.
    """
    kind: object = cls
    for part in key.split("."):
        if is_free_form(kind):
            return ANYTHING
        fields = field_types(kind) if is_settings(kind) else {}
        if part not in fields:
            raise unknown_setting(cls, key)
        kind = fields[part]
    return kind


def unknown_setting(cls: type, key: str, where: str = "") -> UnknownSettingError:
    """Return the error for a key that does not exist; its message names the nearest key, else the
    keys of its section."""
    near = nearest_key(cls, key) if len(key) <= MAX_SHOWN else None
    hint = f"; did you mean {near}?" if near else _known_in_section(cls, key)
    return UnknownSettingError(f"{where}no setting {cut(key)}{hint}", key=key, nearest=near)


def _known_in_section(cls: type, key: str) -> str:
    """Return the settings beside a key that does not exist, for a message."""
    kind: object = cls
    *sections, _ = key.split(".")
    for name in sections:
        kind = field_types(kind).get(name) if is_settings(kind) else None
    if not sections or not is_settings(kind):
        return "; --help lists every setting"
    return f"; section {'.'.join(sections)} has {', '.join(field_types(kind))}"


def nearest_key(cls: type, key: str) -> str | None:
    """Return the existing key that is most similar to `key`, or None if none is similar.

    1. A key that ends with `key`: the user left out the sections.
       `optim.lr` → `actor_rollout_ref.actor.optim.lr`
    2. A setting that `key` begins with: the user added a part. `data.seed.x` → `data.seed`
    3. The key with the most similar last part; between equal last parts, the similarity of the
       whole keys decides. `trainer.sed` → `trainer.seed` and not `data.seed`
    """
    keys = [name for name, _ in walk_keys(cls)]
    longer = [name for name in keys if name.endswith(f".{key}")]
    shorter = [name for name in keys if key.startswith(f"{name}.") and not _is_section(keys, name)]
    if longer or shorter:
        return (longer or shorter)[0]
    leaf = key.rpartition(".")[2]

    def similarity(name: str) -> tuple[float, float]:
        return _ratio(leaf, name.rpartition(".")[2]), _ratio(key, name)

    near = [name for name in keys if similarity(name)[0] >= NEAR]
    return max(near, key=lambda name: sum(similarity(name)), default=None)


def _is_section(keys: list[str], name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in keys)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def check_choice(key: str, value: object, allowed: Iterable[str], where: str = "") -> None:
    """Raise `ConfigError`, naming the nearest choice, unless `value` is one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        raise _no_choice(key, value, allowed, where)


def check_switch(key: str, value: object, kind: object, where: str = "") -> None:
    """Raise `ConfigError` unless `value` is a boolean or a name of `kind` (`is_switch`)."""
    # A list of choices with booleans would accept 1, because True == 1.
    names = switch_names(kind)
    if not isinstance(value, bool) and value not in names:
        raise _no_choice(key, value, ["true", "false", *names], where)


def _no_choice(key: str, value: object, allowed: list[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(cut(str(value)), allowed, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = mask_secrets(cut(repr(value))) if isinstance(value, str) else _as_written(value)
    return ConfigError(
        f"{where}{key} must be one of {', '.join(allowed)}, got {shown}{hint}",
        key=key,
        value=value,
        nearest=near[0] if near else None,
    )


def build(cls: type[T], values: Mapping[str, object], where: str = "") -> T:
    """Return a settings object from nested plain values; settings not given keep their defaults.

    `where` is the beginning of every error message ("run.yaml: "). Raises `UnknownSettingError` and
    `ConfigError`.
    """
    return _Builder(cls, where).section(cls(), values, "")


class _Builder:
    """Builds the sections of one settings class.

    It keeps the root class, because the nearest key to a misspelt one may be in another section.
    """

    def __init__(self, root: type, where: str) -> None:
        self.root, self.where = root, where

    def section(self, default: T, values: object, prefix: str) -> T:
        """Return `default` with the given values replaced.

        The starting point is an object and not its class, because two sections of one class may
        have different defaults: `actor.optim.lr` is 1e-6 and `critic.optim.lr` is 1e-5.
        """
        if not isinstance(values, Mapping):
            raise self.wrong(prefix.rstrip(".") or "settings", "a section of settings", values)
        kinds = field_types(type(default))
        given: dict[str, object] = {}
        for name, value in values.items():
            if name not in kinds:
                raise unknown_setting(self.root, f"{prefix}{name}", self.where)
            if is_settings(kinds[name]):
                given[name] = self.section(getattr(default, name), value, f"{prefix}{name}.")
            else:
                given[name] = self.value(kinds[name], value, f"{prefix}{name}")
        try:
            return dataclasses.replace(default, **given)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:  # `__post_init__` of a section of a user
            name = prefix.rstrip(".")
            raise ConfigError(f"{self.where}{name}: {error}", key=name) from error

    def value(self, kind: object, value: object, key: str) -> object:
        """Return the value of one setting, or raise `ConfigError` if it is not of type `kind`."""
        if kind is ANYTHING or (value is None and allows_none(kind)):
            return value
        inner = without_none(kind)
        origin = typing.get_origin(inner)
        if origin is typing.Literal:
            check_choice(key, value, choices_of(inner), self.where)
            return value
        if is_switch(inner):
            check_switch(key, value, inner, self.where)
            return value
        if is_union(inner):
            if type(value) not in typing.get_args(inner):
                raise self.wrong(key, type_name(kind), value)
            return value
        if origin is dict:
            return self.mapping(inner, value, key)
        if origin in (list, tuple):
            return self.sequence(inner, value, key)
        return self.scalar(inner, value, key, type_name(kind))

    def scalar(self, kind: object, value: object, key: str, expected: str) -> object:
        """Return a number, text or boolean; an integer becomes a float where a float is needed."""
        is_bool = isinstance(value, bool)  # a case of its own: `isinstance(True, int)` is true
        if kind is float and isinstance(value, int) and not is_bool:
            return float(value)
        if is_bool != (kind is bool) or not (isinstance(kind, type) and isinstance(value, kind)):
            raise self.wrong(key, expected, value)
        return value

    def mapping(self, kind: object, value: object, key: str) -> dict[str, object]:
        """Return a free-form mapping with its values checked."""
        if not isinstance(value, Mapping):
            raise self.wrong(key, type_name(kind), value)
        inner = typing.get_args(kind)[1]
        return {str(k): self.value(inner, v, f"{key}.{k}") for k, v in value.items()}

    def sequence(self, kind: object, value: object, key: str) -> list[object] | tuple[object, ...]:
        """Return a list or tuple with its elements checked. One text is a list of it, "" is []."""
        if isinstance(value, str) and kind in (list[str], list[int | str], tuple[str, ...]):
            value = [value] if value else []  # data.train_files=a.parquet, data.train_files=
        if not isinstance(value, list | tuple):
            raise self.wrong(key, type_name(kind), value)
        kinds = self.element_kinds(kind, value, key)
        pairs = enumerate(zip(kinds, value, strict=True))
        items = [self.value(one, v, f"{key}[{i}]") for i, (one, v) in pairs]
        return tuple(items) if typing.get_origin(kind) is tuple else items

    def element_kinds(
        self, kind: object, value: list[object] | tuple[object, ...], key: str
    ) -> list[object]:
        """Return the type of each element. Raises `ConfigError` for a tuple of another length."""
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is list or (len(inner) == 2 and inner[1] is Ellipsis):
            return [inner[0]] * len(value)
        if len(inner) != len(value):
            raise self.wrong(key, type_name(kind), value)
        return list(inner)

    def wrong(self, key: str, expected: str, value: object) -> ConfigError:
        """Return the error for a value of the wrong type."""
        return ConfigError(
            f"{self.where}{key} must be {expected}, got {_as_written(value)}",
            key=key,
            expected=expected,
            value=value,
        )


def _as_written(value: object) -> str:
    """Return a value as the user wrote it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = mask_secrets(cut(repr(value)))
    return f"the text {shown}" if isinstance(value, str) else shown


def cut(text: str) -> str:
    """Return a text for a message, cut at `MAX_SHOWN` characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
