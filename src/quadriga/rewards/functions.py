"""Rule functions: which one scores a row, and how a user's own is found.

A rule function is `f(data_source, solution_str, ground_truth, extra_info) -> float | dict`; it is
called with these four names. A dict holds the score under `score`, and numbers to be logged.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from quadriga.errors import DataError, InputError, UnknownNameError

RewardFunction = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class FunctionRef:
    """Where a reward function is found, in any process: a Python file or a module, and a name."""

    source: str
    name: str

    def load(self) -> RewardFunction:
        """The function itself. Raises `InputError` when there is no such file or name in it."""
        if self.source.endswith(".py"):
            module = _from_file(Path(self.source))
        else:
            module = importlib.import_module(self.source)
        function: RewardFunction | None = getattr(module, self.name, None)
        if function is None or not callable(function):
            there = [n for n, v in vars(module).items() if inspect.isfunction(v)]
            near = difflib.get_close_matches(self.name, there, n=1)
            raise InputError(
                f"reward function {self.name!r} is not in {self.source}; there is "
                f"{', '.join(there) or 'no function'}"
                + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        _check_arguments(function, self)
        return function


_MARKED_ANSWER = FunctionRef("quadriga.rewards.answers", "compute_score")

FUNCTIONS: dict[str, FunctionRef] = {
    "quadriga/arithmetic": _MARKED_ANSWER,
    "openai/gsm8k": _MARKED_ANSWER,
}
"""The rule function of each `data_source`."""


def register_reward_function(data_source: str, path: str, name: str = "compute_score") -> None:
    """Score rows of `data_source` with the function `name` of the Python file or module `path`.

    Raises `InputError` when it cannot be loaded, or the data source has one already.
    """
    if data_source in FUNCTIONS:
        held = FUNCTIONS[data_source]
        raise InputError(
            f"data_source {data_source!r} is scored already, by {held.name!r} of {held.source}"
        )
    ref = FunctionRef(path, name)
    ref.load()
    FUNCTIONS[data_source] = ref


def reward_function_for(data_source: Any) -> FunctionRef:
    """The rule function of a data source. Raises `UnknownNameError` when it has none."""
    if data_source in FUNCTIONS:
        return FUNCTIONS[data_source]
    near = difflib.get_close_matches(str(data_source), FUNCTIONS, n=1)
    raise UnknownNameError(
        f"no rule function for data_source {data_source!r}; there are {', '.join(FUNCTIONS)}. "
        "Give your own with reward.path and reward.name, or register_reward_function",
        name=data_source,
        known=tuple(FUNCTIONS),
        nearest=near[0] if near else None,
    )


def load_reward_function(path: str | Path, name: str = "compute_score") -> FunctionRef:
    """A user's own function, by file and name: loaded once here, so that mistakes show at once.

    Raises `DataError` when the file is missing, `InputError` when it has no such function, does
    not import, or the function does not take the four arguments.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"reward file {file} does not exist", path=str(file))
    ref = FunctionRef(str(file.resolve()), name)
    if file.suffix != ".py":
        raise DataError(f"reward file {file} is not a Python file", path=str(file))
    ref.load()
    return ref


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quadriga_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"reward file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        raise DataError(f"reward file {path} does not exist", path=str(path)) from error
    except (Exception, SystemExit) as error:
        # Whatever a user's file raises while it is imported is a mistake in that file.
        raise InputError(
            f"reward file {path} does not import: {type(error).__name__}: {error}"
        ) from error
    return module


def _check_arguments(function: RewardFunction, ref: FunctionRef) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise InputError(
            f"reward function {ref.name!r} of {ref.source} must take "
            f"{', '.join(ARGUMENTS)}: {error}"
        ) from error
    except ValueError:  # a callable without a signature cannot be checked
        return
