"""Lookups in the tables of algorithms, and the rules for adding an entry.

The tables are literal dicts: `advantages.ADVANTAGES`, `policy_losses.POLICY_LOSSES` and others.
The inputs and settings of an entry are read from the signature of its function, so the table
cannot disagree with the function.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from quadriga.errors import (
    AlgorithmError,
    InputError,
    UnknownSettingError,
    nearest_name,
    unknown_name,
)

Name = TypeVar("Name", bound=str)
Value = TypeVar("Value")
Found = TypeVar("Found")
FnT = TypeVar("FnT", bound=Callable[..., object])


@dataclass(frozen=True)
class Entry(Generic[FnT]):
    """An entry of a table that users can extend.

    Attributes:
        fn: the function. It takes `needs` and `settings` by keyword.
        formula: the formula in the notation of `docs/notation.md`.
        paper: arXiv ids.
        needs: the names of the inputs that `fn` takes.
        settings: the names of the settings that it reads.
        origin: "built-in", or the path of the user's file.
    """

    fn: FnT
    formula: str
    paper: str
    needs: tuple[str, ...]
    settings: tuple[str, ...]
    origin: str


def look_up(table: Mapping[Name, Found], name: Name, kind: str) -> Found:
    """Return the entry `name`.

    Args:
        kind: what the table contains, for the error message.

    Raises:
        UnknownNameError: the table has no such entry. The message contains the nearest name.
    """
    if name not in table:
        raise unknown_name(kind, name, table)
    return table[name]


def table_parameters(module: str, table: str) -> dict[str, Collection[str]]:
    """Return the name of each entry of a table → the parameters of its function.

    The import of such a module takes seconds, because it imports torch. Before that its source is
    read. Functions of other files have no parameters then.
    """
    loaded = sys.modules.get(f"quadriga.algorithms.{module}")
    if loaded is not None:
        entries = vars(loaded)[table].items()
        return {name: (*entry.needs, *entry.settings) for name, entry in entries}
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    found, parameters = dict[str, Collection[str]](), dict[str, Collection[str]]()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            parameters[node.name] = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table:
            assert isinstance(node.value, ast.Dict)
            for key, entry in zip(node.value.keys, node.value.values, strict=True):
                assert key is not None and isinstance(entry, ast.Call)
                name = str(ast.literal_eval(key))
                found[name] = parameters.get(ast.unparse(entry.args[0]), ())
    return found


def split_parameters(
    fn: Callable[..., object], inputs: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the inputs that `fn` takes, the settings that it reads), from its signature.

    `def f(log_prob_BT, advantages_BT, *, weight=0.5)` takes the inputs `log_prob_BT` and
    `advantages_BT` and reads the setting `weight`.

    Args:
        inputs: parameter names that are inputs; every other parameter is a setting.

    Raises:
        InputError: a setting has no default, or the function takes `*args` or `**kwargs`, which
            do not show what it reads.
    """
    taken, settings = [], []
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InputError(
                f"`{fn.__name__}` takes `{parameter}`; name the inputs and settings it reads. "
                f"Inputs are: {', '.join(sorted(inputs))}.",
                function=fn.__name__,
            )
        if name in inputs:
            taken.append(name)
        elif parameter.default is parameter.empty:
            raise InputError(
                f"`{fn.__name__}` takes `{name}`, which is neither an input "
                f"({', '.join(sorted(inputs))}) nor a setting with a default.",
                function=fn.__name__,
            )
        else:
            settings.append(name)
    return tuple(taken), tuple(settings)


def choose_settings(
    given: Mapping[str, object], read: Iterable[str], shared: Collection[str], entry_name: str
) -> dict[str, object]:
    """Return the given settings that an entry reads.

    Args:
        given: the settings of the caller.
        read: the settings that the entry reads.
        shared: settings that may be given to every entry and are dropped if it does not read them.
        entry_name: for the error message.

    Raises:
        UnknownSettingError: a given setting is neither read nor shared.
    """
    read = tuple(read)
    for name in given:
        if name not in read and name not in shared:
            nearest = nearest_name(name, read)
            raise UnknownSettingError(
                f"`{entry_name}` reads no setting `{name}`"
                + (f"; did you mean `{nearest}`?" if nearest else ".")
                + f" It reads: {', '.join(read) or 'none'}.",
                key=name,
                nearest=nearest,
            )
    return {name: value for name, value in given.items() if name in read}


def needed_inputs(
    what: str,
    needs: Iterable[str],
    given: Mapping[str, Value | None],
    remedy: str = "Pass it, or choose one that does not need it.",
) -> dict[str, Value]:
    """Return the given inputs that an entry takes. Raises `AlgorithmError` if one is None.

    Args:
        what: the entry, for the error message.
        given: the inputs of the caller by their names; needs that are not among them are left out.
    """
    inputs = {need: value for need in needs if (value := given.get(need)) is not None}
    # The caller gives `group_ids`, from which `groups` is made.
    names = {need: "group_ids" if need == "groups" else need for need in needs if need in given}
    missing = [name for need, name in names.items() if need not in inputs]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise AlgorithmError(
            f"{what} needs {listed}, but received None. {remedy}", tensor=missing[0]
        )
    return inputs


def refuse_second(table: Mapping[str, Entry[FnT]], name: str, origin: str, kind: str) -> None:
    """Raise `InputError` if `name` is taken by an entry from another file.

    A file that is loaded again replaces its own entries.
    """
    if name in table and table[name].origin != origin:
        raise InputError(
            f"The {kind} `{name}` exists already (from {table[name].origin}). Give the one from "
            f"{origin} another name.",
            name=name,
        )


def origin_of(fn: Callable[..., object]) -> str:
    """Return "built-in" for a function of this package, else the path of its file."""
    # A function that `exec` made in a bare namespace has neither a file nor a module.
    module = fn.__module__ or "unknown"
    if module.startswith("quadriga.algorithms."):
        return "built-in"
    return inspect.getsourcefile(fn) or module
