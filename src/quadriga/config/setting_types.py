"""Questions about the type of a setting, read from the annotations of the schema.

A type is a runtime annotation: a class (`int`), a generic (`list[str]`), a union (`int | None`) or
a `Literal`. These have no common base class, so such a value is typed `object` here.
"""

from __future__ import annotations

import dataclasses
import types
import typing

ANYTHING: object = typing.Any  # the type of the values of a free-form mapping (`schema.Options`)


def is_settings(kind: object) -> typing.TypeGuard[type]:
    """Return whether a type is a section of settings, that is, a dataclass."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def field_types(cls: type) -> dict[str, object]:
    """Return field name → type for a class of settings, with string annotations resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_free_form(kind: object) -> bool:
    """Return whether a type accepts any keys, as `Options` does."""
    return kind is ANYTHING or typing.get_origin(without_none(kind)) is dict


def allows_none(kind: object) -> bool:
    """Return whether null is a value of this type."""
    return kind is ANYTHING or type(None) in typing.get_args(kind)


def is_union(kind: object) -> bool:
    """Return whether a type is a union, such as `int | str`."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_switch(kind: object) -> bool:
    """Return whether a setting is true, false or one of a list of names: `bool | Literal["a"]`."""
    members = [m for m in typing.get_args(kind) if m is not type(None)] if is_union(kind) else []
    return bool in members and any(typing.get_origin(m) is typing.Literal for m in members)


def switch_names(kind: object) -> tuple[str, ...]:
    """Return the names beside true and false of a setting for which `is_switch` holds."""
    return tuple(
        name
        for member in typing.get_args(kind)
        if typing.get_origin(member) is typing.Literal
        for name in typing.get_args(member)
    )


def without_none(kind: object) -> object:
    """Return `X` for `X | None`, and every other type unchanged."""
    if not is_union(kind):
        return kind
    members = tuple(member for member in typing.get_args(kind) if member is not type(None))
    # `X | Y` needs its members in the source; `Union[...]` also builds a union from a tuple.
    return typing.Union[members]  # noqa: UP007


def choices_of(kind: object) -> tuple[str, ...]:
    """Return the closed list of choices of a setting, or of its elements; () if it is open.

    `Literal["ray", "local"] | None` → ("ray", "local"); `list[Literal["+", "-"]]` → ("+", "-").
    """
    kind = without_none(kind)
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def holds_text(kind: object) -> bool:
    """Return whether a setting holds one text: `str`, a `Literal` of texts, or either or None."""
    kind = without_none(kind)
    return kind is str or typing.get_origin(kind) is typing.Literal


_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
_PLURALS: dict[object, str] = {
    int: "integers",
    float: "numbers",
    str: "texts",
    bool: "true/false values",
}


def type_name(kind: object) -> str:
    """Return a type in words: "an integer or null", "a list of 2 numbers", "one of ray, local"."""
    if kind is not ANYTHING and allows_none(kind):
        return f"{type_name(without_none(kind))} or null"
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_switch(kind):
        return "one of " + ", ".join(("true", "false", *switch_names(kind)))
    if is_union(kind):
        return " or ".join(type_name(one) for one in inner)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is list or (origin is tuple and Ellipsis in inner):
        return f"a list of {_plural(inner[0])}"
    if origin is tuple:
        return f"a list of {len(inner)} {_plural(inner[0])}"
    return _NAMES.get(origin or kind, getattr(kind, "__name__", str(kind)))


def _plural(kind: object) -> str:
    choices = choices_of(kind)
    if choices:
        return " or ".join(choices)
    if is_union(kind):
        return " or ".join(_plural(one) for one in typing.get_args(kind))
    return _PLURALS.get(kind, "values")
