"""The rule function that scores a row, a registered one or one in a file of the user, and its call.

A rule function has one of three forms, which its parameters tell (`form_of`):

    f(data_source, solution_str, ground_truth, extra_info) -> float | dict
    f(response, **columns) -> float | dict            columns of the data row, by their names
    f(completions, **columns) -> list of float | dict   a whole batch; each column is a list

Columns are given by name: those that the function has a parameter for, or all of them to `**`. A
returned dict holds the score under "score", other numbers to log, and under "answer" or "pred" the
answer that it found in the response.

A rule function is code of the user, so every part of the outcome of a call is bounded in size, and
an outcome is sent between processes as JSON: reading it runs no code.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import importlib
import inspect
import numbers
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, cast

import cloudpickle
from pydantic import ConfigDict

from quadriga.config.paths import PROGRAM, local_path
from quadriga.containment import code_runs, cut, describe, import_file, reported
from quadriga.errors import DataError, InputError, unknown_name

# `...` and not the four names: a user may annotate `ground_truth` with any type.
RewardFunction = Callable[..., object]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class CallForm:
    """How a function is called.

    Attributes:
        kind: "row": with `ARGUMENTS`; "response": with one response and the columns of its row;
            "batch": with all responses of a batch, and columns as lists.
        response: the parameter that takes the response, or the responses.
        needed, optional: the columns that it has parameters for, without and with a default.
        every: it takes all other columns, too (`**`).
        waits: it is a coroutine function, which a process calls for several samples at once.
    """

    kind: Literal["row", "response", "batch"] = "row"
    response: str = ""
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    every: bool = False
    waits: bool = False

    def columns(self, offered: Mapping[str, object]) -> dict[str, object]:
        """Return the columns that the function is given. Raises `KeyError` if it needs another."""
        missing = [name for name in self.needed if name not in offered]
        if missing:
            found = ", ".join(sorted(offered))
            raise KeyError(f"the reward function needs a column {missing[0]!r}; found {found:.300}")
        taken = offered if self.every else (*self.needed, *self.optional)
        return {k: offered[k] for k in taken if k in offered and k != self.response}


ROW = CallForm()


@dataclass(frozen=True)
class FunctionRef:
    """The source of a reward function (a Python file or a module) and its name.

    A function of a user's file cannot be pickled, because other processes cannot import its module.
    A `FunctionRef` can be sent to any process and loads the function there. `content` is what the
    file had when the run loaded it, so that a process that starts later runs the same, or the
    pickled function of a program, which no process can import.
    """

    source: str
    name: str
    form: CallForm = field(default=ROW, compare=False)
    content: bytes | None = field(default=None, compare=False, repr=False)

    @classmethod
    def loaded(cls, source: str, name: str) -> FunctionRef:
        """Load a function once, so that errors appear before a run starts. Raises as `load`."""
        file = Path(source)
        is_file = source.endswith(".py") and file.is_file()
        ref = cls(source, name, content=file.read_bytes() if is_file else None)
        return replace(ref, form=form_of(ref.load(), f"{name!r} of {source}"))

    def load(self) -> RewardFunction:
        """Return the function. Raises `InputError` if there is no such file or function."""
        if self.source == PROGRAM:
            return GIVEN[self.name]
        if self.source.endswith(".py"):
            module = import_file(Path(self.source), "reward file", content=self.content)
        elif self.content is not None:
            said = f"reward function {self.name} of the program cannot be loaded: "
            with reported(lambda why: InputError(said + why)):
                return cast(RewardFunction, cloudpickle.loads(self.content))
        else:
            said = f"reward module {self.source} cannot be imported: "
            with reported(lambda why: InputError(said + why)):
                module = importlib.import_module(self.source)
        function: RewardFunction | None = getattr(module, self.name, None)
        if function is None or not callable(function):
            defined = [n for n, v in vars(module).items() if inspect.isfunction(v)]
            raise unknown_name(f"reward function in {self.source} named", self.name, defined)
        form_of(function, f"{self.name!r} of {self.source}")
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
    FUNCTIONS[data_source] = FunctionRef.loaded(path, name)


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
    if path == PROGRAM:
        return given_function(name)
    file = Path(local_path(path)).absolute()
    if file.suffix != ".py":
        raise DataError(f"reward file {file} is not a Python file (.py)", path=str(file))
    if code_runs():
        return FunctionRef.loaded(str(file), name)
    if not file.is_file():
        raise DataError(f"reward file {file} does not exist", path=str(file))
    return FunctionRef(str(file), name)


GIVEN: dict[str, RewardFunction] = {}
"""Functions of this program by name. `reward.path=<program>` selects one of them."""


def given_function(name: str) -> FunctionRef:
    """Return a reference to a function of this program, which any process can load."""
    function = GIVEN.get(name)
    if function is None:
        raise InputError(
            f"reward.path={PROGRAM}: the reward function {name} was given by the Python program of "
            "the run; run that program, or set reward.path to a file"
        )
    form = form_of(function, f"{name!r}")
    if form.kind == "batch":  # called where it is
        return FunctionRef(PROGRAM, name, form)
    said = f"reward function {name!r} cannot be sent to the reward processes: "
    remedy = "create that object within the function, or set num_processes=0 to call it here"
    with reported(lambda why: InputError(f"{said}{why}; {remedy}")):
        pickled = cloudpickle.dumps(function)
    digest = hashlib.sha256(pickled).hexdigest()[:16]
    return FunctionRef(f"{PROGRAM} {digest}", name, form, pickled)


def form_of(function: RewardFunction, name: str) -> CallForm:
    """Return how a function is called. Raises `InputError` if its parameters tell no form."""
    if not callable(function):
        got = type(function).__name__
        raise InputError(f"reward {name} must be a function, got {got}: {function!r:.80}")
    waits = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C have no signature
        return ROW
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
        return replace(ROW, waits=waits)
    except TypeError as error:
        problem = error
    named = [
        p for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    takes = [p for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    batch = "completions" in signature.parameters
    first = "completions" if batch else takes[0].name if takes else ""
    columns = [p for p in named if p.name != first]
    if not first or first in ARGUMENTS or any(p.kind == p.POSITIONAL_ONLY for p in columns):
        raise InputError(
            f"reward function {name} must have the parameters (response, …columns), (completions, "
            f"…columns) for a whole batch, or ({', '.join(ARGUMENTS)}): {problem}"
        ) from problem
    return CallForm(
        "batch" if batch else "response",
        first,
        tuple(p.name for p in columns if p.default is p.empty),
        tuple(p.name for p in columns if p.default is not p.empty),
        any(p.kind == p.VAR_KEYWORD for p in signature.parameters.values()),
        waits,
    )


Status = Literal["scored", "abstained", "raised", "timed_out", "crashed"]
SCORED: Final = "scored"
ABSTAINED: Final = "abstained"
"""The function returned None: of several rewards, it has no opinion on the response."""
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
    """The function to call, the response and what the data row gives.

    `columns`: of the row, for a function that takes columns; `solution_str` is the response.
    """

    function: FunctionRef
    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: object
    columns: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a call gives: a score, or the reason why there is none.

    Attributes:
        status: "scored", "abstained", or what went wrong.
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
        value = _value(function, sample)
        return _outcome(_awaited(value) if inspect.isawaitable(value) else value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit` and `CancelledError` are no `Exception`
        # The function is code of the user: one sample that fails must not end the run.
        return Outcome(RAISED, detail=describe(error))


async def call_at_once(
    function: RewardFunction, samples: Sequence[Sample], timeout_s: float
) -> list[Outcome]:
    """Score samples with a coroutine function, all at once, each with the deadline."""

    async def one(sample: Sample) -> Outcome:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return _outcome(await cast("Awaitable[object]", _value(function, sample)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # code of the user, as in `call`
            return _late(timeout_s) if limit.expired() else Outcome(RAISED, detail=describe(error))

    return await asyncio.gather(*map(one, samples))


def call_in_threads(
    function: RewardFunction, samples: Sequence[Sample], timeout_s: float
) -> list[Outcome]:
    """Score samples with a coroutine function that blocks, each in a thread. The threads of samples
    that exceed the deadline are left. A sample that raises is scored again in this thread, because
    some libraries work in the main thread only."""

    def alone(sample: Sample) -> Outcome:
        return asyncio.run(call_at_once(function, [sample], timeout_s))[0]

    threads = ThreadPoolExecutor(len(samples))
    calls = [threads.submit(alone, sample) for sample in samples]
    wait(calls, timeout_s)
    found = [done.result() if done.done() else _late(timeout_s) for done in calls]
    return [
        alone(sample) if outcome.status == RAISED else outcome
        for sample, outcome in zip(samples, found, strict=True)
    ]


def _late(timeout_s: float) -> Outcome:
    return Outcome(TIMED_OUT, detail=f"exceeded its deadline of {timeout_s:g} s")


def _value(function: RewardFunction, sample: Sample) -> object:
    if sample.function.form.kind == "response":
        return function(sample.solution_str, **sample.columns)
    return function(
        data_source=sample.data_source,
        solution_str=sample.solution_str,
        ground_truth=sample.ground_truth,
        extra_info=sample.extra_info,
    )


def call_batch(function: RewardFunction, samples: Sequence[Sample]) -> list[Outcome]:
    """Score samples with one call. If it raises, all of them have the status "raised".

    A response to a prompt that is a chat is given as its message of the assistant, as TRL does.
    """
    chosen = [sample.function.form.columns(sample.columns) for sample in samples]
    names = dict.fromkeys(name for columns in chosen for name in columns)
    lists = {name: [columns.get(name) for columns in chosen] for name in names}
    texts = [
        [{"role": "assistant", "content": sample.solution_str}]
        if isinstance(sample.columns.get("prompts"), list)
        else sample.solution_str
        for sample in samples
    ]
    try:
        value = function(completions=texts, **lists)
        value = _awaited(value) if inspect.isawaitable(value) else value
        found = list(cast("Iterable[object]", value))
        if len(found) != len(samples):
            text = f"it must return one score for each of {len(samples)} completions"
            raise ValueError(f"{text}, got {len(found)}")
        return list(map(_scored, found))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # code of the user, as in `call`
        return [Outcome(RAISED, detail=describe(error))] * len(samples)


def _scored(value: object) -> Outcome:
    try:
        return _outcome(value)
    except (TypeError, ValueError) as error:
        return Outcome(RAISED, detail=describe(error))


_LOOP, _LOOP_IS_FREE = asyncio.Runner(), threading.Lock()
"""The event loop of all coroutines: locks and clients of the user's module belong to one."""
atexit.register(_LOOP.close)


def _awaited(value: Awaitable[object]) -> object:
    """Return the result of a function that is a coroutine."""

    async def wait() -> object:
        return await value

    with _LOOP_IS_FREE:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _LOOP.run(wait())
        with ThreadPoolExecutor(1) as thread:  # as in a notebook, whose thread runs a loop
            return thread.submit(_LOOP.run, wait()).result()


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
    if value is None:
        return Outcome(ABSTAINED, extra=extra, detail="no score: the function returned None")
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
