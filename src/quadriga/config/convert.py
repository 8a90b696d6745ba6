"""Plain values → settings objects, with checks of their keys, types, choices and ranges; `--help`.

`build(TrainConfig, {"data": {"seed": 3}})` returns a frozen `TrainConfig`; its sections are frozen
dataclasses too. Pydantic checks each value against the type of its setting. Types are strict:
`true` and `1.5` are not integers, and the text "3" is not a number. The only conversion is from an
integer to a float.

A type is a runtime annotation: a class (`int`), a generic (`list[str]`), a union (`int | None`), a
`Literal`, or one of these with a range (`Annotated[int, Ge(1)]`). These have no common base class,
so such a value is typed `object` here.
"""

import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from quadriga.config.paths import Dataclass
from quadriga.config.schema import Infinite
from quadriga.config.secrets import mask_secrets
from quadriga.errors import ConfigError, UnknownSettingError, nearest_name

T = TypeVar("T", bound=Dataclass)
MAX_SHOWN = 200  # characters of a key or a value in a message

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_OUT_OF_RANGE = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
_WORDS: dict[object, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true/false values"),
    list: ("a list", "lists"),
    dict: ("a mapping", "mappings"),
    typing.Any: ("a value", "values"),
}
"""Type -> its name for one value, and for several."""


def is_settings(kind: object) -> typing.TypeGuard[type]:
    """Return whether a type is a section of settings, that is, a dataclass."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@functools.cache
def field_types(cls: type) -> dict[str, object]:
    """Return field name → type for a class of settings, with string annotations resolved."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_free_form(kind: object) -> bool:
    """Return whether a type accepts any keys, as `Options` does."""
    return kind is typing.Any or typing.get_origin(_bare(kind)) is dict


def holds_text(kind: object) -> bool:
    """Return whether a setting holds one text: `str`, a `Literal` of texts, or either or None."""
    return _bare(kind) is str or typing.get_origin(_bare(kind)) is typing.Literal


def type_name(kind: object, *, many: bool = False) -> str:
    """Return a type in words: "an integer or null", "a list of 2 numbers", "one of ray, local"."""
    if _is_union(kind) and type(None) in typing.get_args(kind):
        return f"{type_name(_bare(kind))} or null"
    kind = _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if choices := choices_of(kind):
        return " or ".join(choices) if many else "one of " + ", ".join(choices)
    if _is_union(kind):
        return " or ".join(type_name(one, many=many) for one in inner)
    if origin in (list, tuple):
        size = f"{len(inner)} " if origin is tuple and Ellipsis not in inner else ""
        return f"a list of {size}{type_name(inner[0], many=True)}"
    if (origin or kind) in _WORDS:
        return _WORDS[origin or kind][many]
    return str(getattr(kind, "__name__", kind))


def range_of(kind: object) -> str:
    """Return the range of a number, or of each number of a list: "above 0 and at most 1"."""
    inner = typing.get_args(_bare(kind))
    if typing.get_origin(_bare(kind)) in (list, tuple):
        return range_of(inner[0])
    bounds = [
        f"{word} {getattr(bound, name)}"
        for bound in _metadata(kind)
        for name, word in _BOUNDS.items()
        if hasattr(bound, name)
    ]
    return " and ".join(bounds)


def choices_of(kind: object) -> tuple[str, ...]:
    """Return the closed list of choices of a setting; () if it has none.

    `Literal["ray", "local"] | None` → ("ray", "local"); `bool | Literal["a"]` → ("true", "false",
    "a").
    """
    kind = _bare(kind)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    found = [choices_of(one) for one in typing.get_args(kind)] if _is_union(kind) else []
    names = tuple(name for choices in found for name in choices)
    return ("true", "false", *names) if names and bool in typing.get_args(kind) else names


def _bare(kind: object) -> object:
    """Return `int` for `int | None`, `Annotated[int, Ge(1)]` and `Annotated[int, Ge(1)] | None`."""
    if _is_union(kind):
        members = tuple(member for member in typing.get_args(kind) if member is not type(None))
        kind = typing.Union[members]  # noqa: UP007 — `X | Y` needs its members in the source
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def _metadata(kind: object) -> tuple[object, ...]:
    kinds = typing.get_args(kind) if _is_union(kind) else (kind,)
    return tuple(one for member in kinds for one in getattr(member, "__metadata__", ()))


def _is_union(kind: object) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def walk_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, type) for every setting of a class, sections included."""
    for name, kind in field_types(cls).items():
        key = f"{prefix}{name}"
        yield key, kind
        if is_settings(kind):
            yield from walk_keys(kind, f"{key}.")


def leaves(config: Dataclass, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for every setting of an object, sections excluded."""
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def type_of_key(cls: type, key: str) -> object:
    """Return the type of a dotted key; `Any` for a key below free-form options.

    Raises `UnknownSettingError` if there is no such key.
    """
    kind: object = cls
    for part in key.split("."):
        if is_free_form(kind):
            return typing.Any
        fields = field_types(kind) if is_settings(kind) else {}
        if part not in fields:
            raise unknown_setting(cls, key)
        kind = fields[part]
    return kind


def unknown_setting(cls: type, key: str, where: str = "") -> UnknownSettingError:
    """Return the error for a key that does not exist; its message names the nearest key, else the
    keys of its section."""
    near = nearest_key(cls, key) if len(key) <= MAX_SHOWN else None
    hint = f"; did you mean {near}?" if near else "; --help lists every setting"
    section = key.rpartition(".")[0]
    kind = dict(walk_keys(cls)).get(section)
    if not near and is_settings(kind):
        hint = f"; section {section} has {', '.join(field_types(kind))}"
    elif not near and "." in key and key.partition(".")[0] not in field_types(cls):
        hint += "; a role of yours has its settings once algorithm.user_files names its file"
    return UnknownSettingError(f"{where}no setting {cut(key)}{hint}", key=key, nearest=near)


def nearest_key(cls: type, key: str) -> str | None:
    """Return the existing key that is most similar to `key`, or None if none is similar.

    1. A key that ends with `key`: the user left out the sections.
       `optim.lr` → `actor_rollout_ref.actor.optim.lr`
    2. A setting that `key` begins with: the user added a part. `data.seed.x` → `data.seed`
    3. The most similar last part, and of the keys that end with it the most similar one.
       `trainer.sed` → `trainer.seed` and not `data.seed`
    """
    kinds = dict(walk_keys(cls))
    longer = [name for name in kinds if name.endswith(f".{key}")]
    shorter = [n for n, kind in kinds.items() if key.startswith(f"{n}.") and not is_settings(kind)]
    if longer or shorter:
        return (longer or shorter)[0]
    last = {name: name.rpartition(".")[2] for name in kinds}
    near = nearest_name(key.rpartition(".")[2], last.values(), least=0.7)
    return nearest_name(key, [name for name in kinds if last[name] == near], least=0.0)


def build(cls: type[T], values: Mapping[str, object], where: str = "", prefix: str = "") -> T:
    """Return a settings object from nested plain values; settings not given keep their defaults.

    Args:
        where: the beginning of every error message ("run.yaml: ").
        prefix: the beginning of every key ("actor_rollout_ref.rollout.options.").

    Raises:
        UnknownSettingError, ConfigError: names the key, the value and what is allowed.
    """
    return _section(cls, cls(), values, prefix, where)


def _section(root: type, default: T, values: object, prefix: str, where: str) -> T:
    """Return `default` with the given values replaced.

    The starting point is an object and not its class, because two sections of one class may have
    different defaults: `actor.optim.lr` is 1e-6 and `critic.optim.lr` is 1e-5. `root` is the whole
    class, because the nearest key to a misspelt one may be in another section.
    """
    section = prefix.rstrip(".") or "settings"
    if not isinstance(values, Mapping):
        raise _wrong(section, "a section of settings", values, where)
    kinds = field_types(type(default))
    given: dict[str, object] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in kinds:
            raise unknown_setting(root, key, where)
        if is_settings(kinds[name]):
            given[name] = _section(root, getattr(default, name), value, f"{key}.", where)
            continue
        if isinstance(value, str) and _bare(kinds[name]) in _LISTS_OF_TEXT:
            value = [value] if value else []  # data.train_files=a.parquet, data.train_files=
        given[name] = checked(kinds[name], value, key, where)
    try:
        return dataclasses.replace(default, **given)
    except ConfigError as error:
        name = str(getattr(error, "key", ""))
        if name not in given or not str(error).startswith(name):
            raise
        raise ConfigError(f"{where}{prefix}{error}", key=f"{prefix}{name}") from None
    except (ValueError, TypeError) as error:  # `__post_init__` of a section of a user
        raise ConfigError(f"{where}{section}: {error}", key=section) from error


_LISTS_OF_TEXT = (list[str], list[int | str], tuple[str, ...])


def check_values(config: Dataclass) -> None:
    """Raise `ConfigError` for the first setting that has the wrong type, is out of range or not one
    of its choices. `build` has checked that; a settings object that a program makes is unchecked.
    """
    kinds = dict(walk_keys(type(config)))
    for key, value in leaves(config):
        checked(kinds[key], value, key)


def checked(kind: object, value: object, key: str, where: str = "") -> object:
    """Return the value of one setting. Raises `ConfigError` if it is not of type `kind`."""
    if isinstance(value, list) and typing.get_origin(_bare(kind)) is tuple:
        value = tuple(value)
    if isinstance(value, Mapping):
        value = {str(name): item for name, item in value.items()}
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    for step in first["loc"]:  # to the element of a list or a mapping
        if isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            kinds = typing.get_args(_bare(kind))
            kind = kinds[0] if kinds[-1] is Ellipsis or len(kinds) == 1 else kinds[step]
            value, key = value[step], f"{key}[{step}]"
        elif isinstance(value, dict) and step in value:
            kind, value, key = typing.get_args(_bare(kind))[1], value[step], f"{key}.{step}"
    if first["type"] == "finite_number":
        raise _wrong(key, "a finite number", value, where)
    if first["type"] in _OUT_OF_RANGE:
        raise _wrong(key, range_of(kind), value, where)
    if choices := choices_of(kind):
        raise _no_choice(key, value, choices, where)
    raise _wrong(key, type_name(kind), value, where)


@functools.cache
def _adapter(kind: object) -> TypeAdapter[object]:
    infinite = Infinite() in _metadata(kind)
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=infinite)
    return TypeAdapter(kind, config=config)  # type: ignore[arg-type]  # an annotation


def check_choice(key: str, value: object, allowed: Iterable[str]) -> None:
    """Raise `ConfigError`, naming the nearest choice, unless `value` is one of `allowed`."""
    if value not in (allowed := list(allowed)):
        raise _no_choice(key, value, allowed, "")


def _no_choice(key: str, value: object, allowed: Iterable[str], where: str) -> ConfigError:
    near = nearest_name(cut(str(value)), allowed)
    hint = f"; did you mean {near}?" if near else ""
    shown = mask_secrets(cut(repr(value))) if isinstance(value, str) else _as_written(value)
    return ConfigError(
        f"{where}{key} must be one of {', '.join(allowed)}, got {shown}{hint}",
        key=key,
        value=value,
        nearest=near,
    )


def _wrong(key: str, expected: str, value: object, where: str) -> ConfigError:
    return ConfigError(
        f"{where}{key} must be {expected}, got {_as_written(value)}",
        key=key,
        expected=expected,
        value=value,
    )


def _as_written(value: object) -> str:
    """Return a value as the user wrote it."""
    if value is None or isinstance(value, bool):
        return as_written(value)
    shown = mask_secrets(cut(repr(list(value) if isinstance(value, tuple) else value)))
    return f"the text {shown}" if isinstance(value, str) else shown


def cut(text: str) -> str:
    """Return a text for a message, cut at `MAX_SHOWN` characters."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


# Texts for `--help`. They are read from the schema, so they cannot differ from it.

# One line of a dataclass: "    seed: int = 0  # comment", or "    # comment" above the field.
_FIELD = re.compile(r"\s{4}(?P<name>\w+): [^#]*(?:#\s*(?P<comment>.+))?$")
_ABOVE = re.compile(r"\s{4}#\s*(?P<comment>.+)$")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting. `default` is written as on the command line."""

    key: str
    kind: str
    default: str
    meaning: str


def settings_of(config: Dataclass) -> Iterator[Setting]:
    """Yield the settings of an object in the order of the schema; its values are the defaults."""
    kinds = {"": type(config), **dict(walk_keys(type(config)))}
    for key, value in leaves(config):
        section, _, name = key.rpartition(".")
        comments, kind = _comments(kinds[section]), kinds[key]
        words = ", ".join(filter(None, (type_name(kind), range_of(kind))))
        meaning = comments.get(name, "").replace("None:", "null:")
        yield Setting(key, words, as_written(value), meaning)


def help_text(config: Dataclass, words: Iterable[str] = ()) -> str:
    """Return all settings of a command: `key=default  (type; comment)`. A line is as wide as the
    terminal at most; without a terminal, each setting has one line.

    Args:
        words: leave out settings without one of these at the beginning of a word of their name or
            comment.
    """
    lines: list[str] = []
    section, width = "", shutil.get_terminal_size((100_000, 24)).columns
    starts = [re.compile(rf"(?<![^\W_]){re.escape(word)}", re.IGNORECASE) for word in words]
    for setting in settings_of(config):
        named = setting.key.removeprefix("actor_rollout_ref."), setting.meaning
        if not all(any(map(start.search, named)) for start in starts):
            continue
        head = setting.key.rpartition(".")[0]
        if head != section:
            section = head
            lines.append("")
        meaning = f"; {setting.meaning}" if setting.meaning else ""
        line = f"  {setting.key}={setting.default}  ({setting.kind}{meaning})"
        lines += textwrap.wrap(line, width, subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def as_written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_written(v) or "''" for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{as_written(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


@functools.cache
def _comments(cls: object) -> dict[str, str]:
    """Return field name → comment on its line, else above it, with those of inherited fields.

    A class whose source cannot be read has none.
    """
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__ if isinstance(cls, type) else ()):
        try:
            lines = inspect.getsource(base).splitlines() if is_settings(base) else []
        except OSError:
            continue
        above: list[str] = []
        for line in lines:
            if (comment := _ABOVE.match(line)) is not None:
                above.append(comment["comment"])
                continue
            if (field := _FIELD.match(line)) is not None:
                comments[field["name"]] = field["comment"] or " ".join(above)
            above = []
    return comments


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain values with each text in their dicts and lists changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: with_texts(item, change) for key, item in value.items()}
    return [with_texts(item, change) for item in value] if isinstance(value, list) else value
