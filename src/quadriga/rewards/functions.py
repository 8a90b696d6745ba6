"""The rule function that scores a row, a registered one or one in a file of the user, and its call.

A rule function is `f(data_source, solution_str, ground_truth, extra_info) -> float | dict`. It is
called with these four names as keyword arguments. A returned dict holds the score under "score",
other numbers to log, and under "answer" or "pred" the answer that it found in the response.

A rule function is code of the user, so every part of the outcome of a call is bounded in size, and
an outcome is sent between processes as JSON: reading it runs no code.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict

from quadriga.config.paths import local_path
from quadriga.containment import code_runs, cut, describe, import_file, reported
from quadriga.errors import DataError, InputError, unknown_name

# `...` and not the four names: a user may annotate `ground_truth` with any type.
RewardFunction = Callable[..., object]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class FunctionRef:
    """The source of a reward function (a Python file or a module) and its name.

    A function of a user's file cannot be pickled, because other processes cannot import its module.
    A `FunctionRef` can be sent to any process and loads the function there.
    """

    source: str
    name: str

    def load(self) -> RewardFunction:
        """Return the function. Raises `InputError` if there is no such file or function."""
        if self.source.endswith(".py"):
            module = import_file(Path(self.source), "reward file")
        else:
            said = f"reward module {self.source} cannot be imported: "
            with reported(lambda why: InputError(said + why)):
                module = importlib.import_module(self.source)
        function: RewardFunction | None = getattr(module, self.name, None)
        if function is None or not callable(function):
            defined = [n for n, v in vars(module).items() if inspect.isfunction(v)]
            raise unknown_name(f"reward function in {self.source} named", self.name, defined)
        _check_arguments(function, self)
        return function


MARKED_ANSWER = FunctionRef("quadriga.rewards.functions", "compute_score")
MATHEMATICS = FunctionRef("quadriga.rewards.mathematics", "compute_score")
MULTIPLE_CHOICE = FunctionRef("quadriga.rewards.multiple_choice", "compute_score")

FUNCTIONS: dict[str, FunctionRef] = {
    "quadriga/arithmetic": MARKED_ANSWER,
    "openai/gsm8k": MARKED_ANSWER,
    "quadriga/mathematics": MATHEMATICS,
    "lighteval/MATH": MATHEMATICS,
    "DigitalLearningGmbH/MATH-lighteval": MATHEMATICS,
    "HuggingFaceH4/MATH-500": MATHEMATICS,
    "HuggingFaceH4/aime_2024": MATHEMATICS,
    "math_dapo": MATHEMATICS,
    "quadriga/multiple_choice": MULTIPLE_CHOICE,
    "cais/mmlu": MULTIPLE_CHOICE,
    "TIGER-Lab/MMLU-Pro": MULTIPLE_CHOICE,
    "allenai/ai2_arc": MULTIPLE_CHOICE,
    "Idavidrein/gpqa": MULTIPLE_CHOICE,
}
"""data_source → rule function."""

BUILT_IN = frozenset({MARKED_ANSWER, MATHEMATICS, MULTIPLE_CHOICE})
"""Functions that read a ground truth."""

FAST = frozenset({MARKED_ANSWER, MULTIPLE_CHOICE})
"""Functions that take microseconds for any response, so they need no other process."""


def register_reward_function(data_source: str, path: str, name: str = "compute_score") -> None:
    """Score rows of `data_source` with the function `name` of the Python file or module `path`.

    Raises `InputError` if the function cannot be loaded or the data source already has one.
    """
    if data_source in FUNCTIONS:
        held = f"{FUNCTIONS[data_source].name!r} of {FUNCTIONS[data_source].source}"
        raise InputError(f"data_source {data_source!r} already has a reward function, {held}")
    ref = FunctionRef(path, name)
    ref.load()
    FUNCTIONS[data_source] = ref


def reward_function_for(data_source: object) -> FunctionRef:
    """Return the rule function of a data source. Raises `UnknownNameError` if it has none."""
    if isinstance(data_source, str) and data_source in FUNCTIONS:
        return FUNCTIONS[data_source]
    remedy = "; set reward.path and reward.name, or call register_reward_function"
    if data_source is None:
        remedy = f"; the column data_source is missing, or empty{remedy}"
    raise unknown_name("rule function for data_source", data_source, FUNCTIONS, remedy)


def load_reward_function(path: str | Path, name: str = "compute_score") -> FunctionRef:
    """Return a reference to a function of the user, by file and name.

    The function is loaded once, so that errors appear before a run starts.

    Raises:
        DataError: the file is missing or is not a Python file.
        InputError: the file cannot be imported, has no such function, or the function does not
            accept the four arguments.
    """
    file = Path(local_path(path)).absolute()
    if file.suffix != ".py":
        raise DataError(f"reward file {file} is not a Python file (.py)", path=str(file))
    ref = FunctionRef(str(file), name)
    if code_runs():
        ref.load()
    elif not file.is_file():
        raise DataError(f"reward file {file} does not exist", path=str(file))
    return ref


def _check_arguments(function: RewardFunction, ref: FunctionRef) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise InputError(
            f"reward function {ref.name!r} of {ref.source} must accept the arguments "
            f"{', '.join(ARGUMENTS)}: {error}"
        ) from error
    except ValueError:  # some callables written in C have no signature to check
        return


Status = Literal["scored", "raised", "timed_out", "crashed"]
SCORED: Final = "scored"
RAISED: Final = "raised"
TIMED_OUT: Final = "timed_out"
CRASHED: Final = "crashed"
FAILURES: tuple[Status, ...] = (RAISED, TIMED_OUT, CRASHED)

MAX_EXTRAS = 64  # entries of the dict that a function returns besides its score
MAX_NAME = 100  # characters of the key of such an entry
LARGEST = 3.4028234663852886e38  # of float32
MAX_TEXT = 1000  # characters of the value of such an entry, if it is a text


@dataclass(frozen=True)
class Sample:
    """The four arguments of a rule function, and the function to call."""

    function: FunctionRef
    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: object


@dataclass(frozen=True)
class Outcome:
    """What a call gives: a score, or the reason why there is none.

    Attributes:
        status: "scored", or what went wrong.
        score: 0 if the sample was not scored.
        extra: the other entries of the dict that the function returned.
        detail: the exception, the deadline or the exit code, for messages.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    status: Status
    score: float = 0.0
    extra: dict[str, float | str] = field(default_factory=dict)
    detail: str = ""


def call(function: RewardFunction, sample: Sample) -> Outcome:
    """Score one sample. An exception of the function becomes an outcome with status "raised"."""
    try:
        value = function(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        return _outcome(_awaited(value) if inspect.isawaitable(value) else value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit` and `CancelledError` are no `Exception`
        # The function is code of the user: one sample that fails must not end the run.
        return Outcome(RAISED, detail=describe(error))


def _awaited(value: Awaitable[object]) -> object:
    """Return the result of a function that is a coroutine."""

    async def wait() -> object:
        return await value

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as thread:  # as in a notebook, whose thread runs a loop
        return thread.submit(asyncio.run, wait()).result()


def _outcome(value: object) -> Outcome:
    """Convert the return value of a rule function, a number or a dict with "score"."""
    extra: dict[str, float | str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"a returned dict needs 'score', got {sorted(map(str, value))}")
        if len(value) > MAX_EXTRAS + 1:
            allowed = f"'score' and at most {MAX_EXTRAS} others are allowed"
            raise ValueError(f"a returned dict has {len(value)} entries; {allowed}")
        others = {k: v for k, v in value.items() if k != "score" and v is not None}
        extra = plain_extras(others)
        for name, number in extra.items():
            if isinstance(number, float):
                checked_score(number, f"the entry {name!r} of a returned dict")
        value = value["score"]
    # `__float__` and not `float`: a score may be a numpy or torch scalar.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"a score must be a number, got {type(value).__name__}")
    return Outcome(SCORED, checked_score(float(value)), extra)


def checked_score(score: float, what: str = "a score") -> float:
    """Return a number that a float32 tensor can hold. Raises `ValueError` for any other."""
    if not abs(score) <= LARGEST:
        raise ValueError(f"{what} must be finite and at most {LARGEST:.3g}, got {score}")
    return score


def plain_extras(values: Mapping[object, object]) -> dict[str, float | str]:
    """Return what a function returned besides its score, as numbers and texts of bounded size."""
    return {cut(str(name), MAX_NAME): _plain(value) for name, value in values.items()}


def _plain(value: object) -> float | str:
    """Return a number or the text of a value, which can be sent as JSON and logged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch, also a boolean
    return float(value) if isinstance(value, numbers.Real) else cut(str(value), MAX_TEXT)


# The built-in rule: compare the number after `####` with the ground truth, as in GSM8K.

# "-12", "1,234", "0.5"; the last character is a digit, so a full stop after the number is left out.
_MARKED = re.compile(r"####\s*(-?[\d.,]*\d)")


_CLOSED = re.compile(r"</think(?:ing)?>")
_THINKING = re.compile(r"<think(?:ing)?>.*", re.DOTALL)


def after_thoughts(solution: str) -> str:
    """Return a response without its thoughts: `<think>7</think>8` → `8`, `<think>7` → ``."""
    return _THINKING.sub("", _CLOSED.split(solution)[-1])


def marked_answer(solution: str) -> str | None:
    """Return the number after the last `####` that is no thought, without thousands separators.

    "3+4=7\\n#### 7" → "7"; "#### 1,234" → "1234"; "#### seven" → None.
    """
    found = _MARKED.findall(after_thoughts(solution))
    return found[-1].replace(",", "") if found else None


def same_number(left: str, right: str) -> bool:
    """Return whether two texts are equal as numbers ("5", "5.0", "05"), or else equal as texts."""
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.strip() == right.strip()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """Return 1.0 if the number after the last `####` equals `ground_truth`, else 0.0.

    This is the rule of GSM8K (arXiv 2110.14168). It requires the form: a correct number without
    `####` scores 0.
    """
    del data_source, extra_info
    answer = marked_answer(solution_str)
    return float(answer is not None and same_number(answer, str(ground_truth)))
