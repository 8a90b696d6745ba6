"""Plain values to typed settings: one place that knows keys, types and how to say what is wrong.

`build(TrainConfig, {"data": {"seed": 3}})` gives a frozen `TrainConfig`, every level a dataclass.
Nothing is guessed: `true` is no integer, `1.5` is no integer, and a text is no number.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, Union

from quadriga.errors import ConfigError, UnknownSettingError

T = TypeVar("T")
NEAR = 0.7  # likeness of last parts, below which no key is called near


def is_settings(kind: Any) -> bool:
    """Whether a type is a section of settings: a dataclass."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def field_types(cls: type) -> dict[str, Any]:
    """Field name → resolved type of a settings class."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def walk_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key below a settings class with its type, sections included."""
    for name, kind in field_types(cls).items():
        key = f"{prefix}{name}"
        yield key, kind
        if is_settings(kind):
            yield from walk_keys(kind, f"{key}.")


def type_of_key(cls: type, key: str) -> Any:
    """The type of a dotted key; `Any` below a free-form dict. Raises `UnknownSettingError`."""
    kind: Any = cls
    for part in key.split("."):
        if is_free_form(kind):
            return Any
        fields = field_types(kind) if is_settings(kind) else {}
        if part not in fields:
            raise unknown_setting(cls, key)
        kind = fields[part]
    return kind


def is_free_form(kind: Any) -> bool:
    """Whether a type takes keys of the user's own, as the `options` do."""
    return kind is Any or typing.get_origin(_without_none(kind)) is dict


def unknown_setting(cls: type, key: str, where: str = "") -> UnknownSettingError:
    """The error for a key that does not exist, naming the nearest one that does."""
    near = nearest_key(cls, key)
    hint = f"; did you mean {near}?" if near else "; --help lists every setting"
    return UnknownSettingError(f"{where}no setting {key}{hint}", key=key, nearest=near)


def nearest_key(cls: type, key: str) -> str | None:
    """The existing dotted key most like `key`, or None if none is like it.

    A key that ends with all of `key` is nearest (a prefix was left out); then one that `key`
    begins with (something was added); then the one whose last part is most alike.
    """
    keys = [name for name, _ in walk_keys(cls)]
    longer = [name for name in keys if name.endswith(f".{key}")]
    shorter = [name for name in keys if key.startswith(f"{name}.") and not _has_below(keys, name)]
    if longer or shorter:
        return (longer or shorter)[0]
    leaf = key.rpartition(".")[2]

    def likeness(name: str) -> tuple[float, float]:
        return _ratio(leaf, name.rpartition(".")[2]), _ratio(key, name)

    near = [name for name in keys if likeness(name)[0] >= NEAR]
    return max(near, key=lambda name: sum(likeness(name)), default=None)


def _has_below(keys: list[str], name: str) -> bool:
    return any(other.startswith(f"{name}.") for other in keys)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """A settings object from nested plain values; what is not given keeps its default.

    `where` opens every message ("run.yaml: "). Raises `UnknownSettingError`, `ConfigError`.
    """
    return typing.cast(T, _Builder(cls, where).section(cls(), values, ""))


class _Builder:
    """Knows the whole settings class, so that a nearest key can lie in another section."""

    def __init__(self, root: type, where: str) -> None:
        self.root, self.where = root, where

    def section(self, default: Any, values: Any, prefix: str) -> Any:
        """`default` with what is given in its place; two sections of one class differ in theirs."""
        if not isinstance(values, Mapping):
            raise self.wrong(prefix.rstrip(".") or "settings", "a section of settings", values)
        kinds = field_types(type(default))
        given = {}
        for name, value in values.items():
            if name not in kinds:
                raise unknown_setting(self.root, f"{prefix}{name}", self.where)
            if is_settings(kinds[name]):
                given[name] = self.section(getattr(default, name), value, f"{prefix}{name}.")
            else:
                given[name] = self.value(kinds[name], value, f"{prefix}{name}")
        return dataclasses.replace(default, **given)

    def value(self, kind: Any, value: Any, key: str) -> Any:
        if kind is Any:
            return value
        if value is None and allows_none(kind):
            return None
        inner = _without_none(kind)
        origin = typing.get_origin(inner)
        if origin in (list, tuple, dict):
            return self.container(inner, origin, value, key)
        if origin is typing.Literal:
            matches = value in typing.get_args(inner)
        elif inner is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        else:
            matches = isinstance(value, inner) and (inner is bool or not isinstance(value, bool))
        if not matches:
            raise self.wrong(key, type_name(kind), value)
        return value

    def container(self, kind: Any, origin: Any, value: Any, key: str) -> Any:
        if origin is dict:
            if not isinstance(value, Mapping):
                raise self.wrong(key, type_name(kind), value)
            inner = typing.get_args(kind)[1]
            return {str(k): self.value(inner, v, f"{key}.{k}") for k, v in value.items()}
        if isinstance(value, str) and kind == list[str]:
            value = [value]  # one file, as people write it
        if not isinstance(value, list | tuple):
            raise self.wrong(key, type_name(kind), value)
        kinds = self.element_kinds(kind, origin, value, key)
        pairs = enumerate(zip(kinds, value, strict=True))
        return origin(self.value(one, v, f"{key}[{i}]") for i, (one, v) in pairs)

    def element_kinds(self, kind: Any, origin: Any, value: Any, key: str) -> list[Any]:
        inner = typing.get_args(kind)
        if origin is list or (len(inner) == 2 and inner[1] is Ellipsis):
            return [inner[0]] * len(value)
        if len(inner) != len(value):
            raise self.wrong(key, type_name(kind), value)
        return list(inner)

    def wrong(self, key: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(
            f"{self.where}{key} must be {expected}, got {_shown(value)}",
            key=key,
            expected=expected,
            value=value,
        )


def _shown(value: Any) -> str:
    """A value as the user wrote it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`; every other type as it is."""
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind
    return Union[tuple(a for a in typing.get_args(kind) if a is not type(None))]  # noqa: UP007


def allows_none(kind: Any) -> bool:
    """Whether null is a value of this type."""
    return kind is Any or type(None) in typing.get_args(kind)


NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def type_name(kind: Any) -> str:
    """A type in words: "an integer or null", "a list of 2 numbers"."""
    if allows_none(kind) and kind is not Any:
        return f"{type_name(_without_none(kind))} or null"
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is list or (origin is tuple and Ellipsis in inner):
        return f"a list of {_plural(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)} {_plural(inner[0])}"
    return NAMES.get(origin or kind, getattr(kind, "__name__", str(kind)))


def _plural(kind: Any) -> str:
    return {int: "integers", float: "numbers", str: "texts", bool: "true/false values"}.get(
        kind, "values"
    )
