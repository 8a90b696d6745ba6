"""What an environment is: a class in a Python file of the user, with one object for each episode.

    class Environment:
        def reset(self, row):                # the columns of the data row, by their names
            self.number = row["number"]

        def step(self, action):              # what the policy has written in its turn
            if str(self.number) in action.text:
                return Done(reward=1.0)
            return Observation("Wrong. Guess again.")

An episode begins with the prompt of its data row. The policy writes a turn; `step` returns what it
sees before its next turn, or that the episode has ended. Both methods may be coroutines. They run
in processes of their own, where a method that is no coroutine has a thread. A method `close`, if
there is one, is called when the episode is over.

In place of a class, the file may have a function that plays a whole episode (`agents.program`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from quadriga.containment import code_runs, import_file
from quadriga.errors import ConfigError, InputError

Message = dict[str, Any]
"""A message of a chat: `role` and `content`, of a tool also its `name`."""
MAX_CHARACTERS = 1 << 20
"""Of the messages of an observation."""
LARGEST = 1e30
"""Reward or metric; sums of them are float32."""
OWN_METRICS = ("raised", "timed_out", "crashed", "contexts", "rewritten_turns")
"""Names below `agent/` that a run has itself."""


@dataclass(frozen=True)
class Action:
    """A turn of the policy.

    Attributes:
        text: with special tokens, without the token that ends the turn.
        turn: its number, from 1.
        finished: the policy has ended it; otherwise it was cut at a limit.
        tokens: (text, log-probability in nats) of each of its tokens.
        prompt_tokens: how many tokens of its context stand before it.
    """

    text: str
    turn: int
    finished: bool = True
    tokens: Sequence[tuple[str, float]] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Observation:
    """What the policy sees before its next turn.

    Attributes:
        messages: of a chat; a text is one message of the user.
        reward: of the turn before.
        metrics: numbers to log; the mean over episodes of their sums is shown.
        new_context: the messages are a whole conversation, in place of all that the policy has
            seen; they may have turns of the assistant.
    """

    messages: str | Sequence[Message]
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    new_context: bool = False


@dataclass(frozen=True)
class Done:
    """The episode has ended, with the reward of its last turn."""

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Methods may be coroutines."""

    def reset(self, row: Mapping[str, object]) -> Observation | None:
        """Begin the episode of a data row. What it returns is added to the prompt."""
        ...

    def step(self, action: Action) -> Observation | Done:
        """Answer a turn."""
        ...


Played = Callable[..., Coroutine[Any, Any, object]]
"""A coroutine function that plays an episode (`agents.program`)."""


@dataclass(frozen=True)
class EnvironmentRef:
    """A class or a function in a file of the user, which any process can load.

    Attributes:
        content: what the file had when the run loaded it.
        tool_format: in which the policy writes calls of tools, for a function.
    """

    path: str
    name: str
    options: Mapping[str, object] = field(default_factory=dict)
    content: bytes | None = field(default=None, repr=False)
    tool_format: str | None = None

    def loaded(self) -> EnvironmentRef:
        """Load the class or function once, so that its errors appear before a run starts. Raises
        as `load`."""
        if not code_runs():
            return self
        file = Path(self.path)
        ref = replace(self, content=file.read_bytes() if file.is_file() else None)
        ref.load()
        return ref

    def load(self) -> type[Environment] | Played:
        """Return the class or the function.

        Raises:
            DataError: there is no such file.
            InputError: it cannot be imported.
            ConfigError: it has no such class, or the class lacks a method or does not take the
                options.
        """
        file, content = Path(self.path), self.content
        if content is None and file.is_file():
            content = file.read_bytes()
        module = _imported(file, content)
        found = getattr(module, self.name, None)
        where = f"agent.name={self.name} of agent.path={self.path}"
        if inspect.iscoroutinefunction(found):
            if (problem := _unfit(found, None, None, **self.options)) is not None:
                text = f"{where} must take (model, row) and agent.options={dict(self.options)}"
                raise ConfigError(f"{text}: {problem}", key="agent.path")
            return cast("Played", found)
        if not inspect.isclass(found):
            own = [
                name for name, value in vars(module).items()
                if (inspect.isclass(value) and hasattr(value, "step"))
                or (inspect.iscoroutinefunction(value) and value.__module__ == module.__name__)
            ]  # fmt: skip
            what = "does not exist" if found is None else "is no class and no coroutine function"
            raise ConfigError(
                f"{where} {what}; classes with a method step and coroutine functions: "
                f"{', '.join(own) or 'none'}",
                key="agent.name",
            )
        for method, given in {"reset": "row", "step": "action"}.items():
            function = getattr(found, method, None)
            if not callable(function):
                raise ConfigError(
                    f"{where} has no method {method}(self, {given})", key="agent.path"
                )
            if (problem := _unfit(function, None, None)) is not None:
                text = f"{where}: {method} must take (self, {given}): {problem}"
                raise ConfigError(text, key="agent.path")
        if (problem := _unfit(found, **self.options)) is not None:
            text = f"{where} does not take agent.options={dict(self.options)}: {problem}"
            raise ConfigError(text, key="agent.options")
        return cast("type[Environment]", found)


@lru_cache(maxsize=4)
def _imported(path: Path, content: bytes | None) -> ModuleType:
    """Import a file once in this process."""
    return import_file(path, "environment file", content=content)


def _unfit(function: Callable[..., object], *args: object, **kwargs: object) -> str | None:
    """Return why a function cannot be called with these arguments; None: it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class of C has no signature
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return None


def checked(returned: object, ends: bool) -> Observation | Done | None:
    """Return what a method has returned, in one form: messages are a list, numbers are floats.

    Args:
        ends: it is of `step`, which may return `Done` and must not return None.

    Raises:
        InputError: it is of another type, has a number that is not finite, a reward with `reset`,
            or messages that cannot be used.
    """
    if returned is None and not ends:
        return None
    found = Observation(returned) if isinstance(returned, str) else returned
    if not isinstance(found, Observation | Done) or (isinstance(found, Done) and not ends):
        wanted = "reset must return an Observation or None"
        if ends:
            wanted = "step must return an Observation or Done"
        raise InputError(f"{wanted}, got {type(returned).__name__}: {returned!r:.80}")
    if not isinstance(found.metrics, Mapping):
        raise InputError(f"metrics must be a dict, got {found.metrics!r:.80}")
    reward = _number("reward", found.reward)
    metrics = {name: _number(name, value) for name, value in found.metrics.items()}
    if not ends and (reward or metrics):
        raise InputError("what reset returns has no reward and no metrics; give them to step")
    wrong = [n for n in metrics if not isinstance(n, str) or "/" in n or n in OWN_METRICS]
    if wrong:
        raise InputError(f"a metric must have a name without / of its own, got {wrong[0]!r:.80}")
    if isinstance(found, Done):
        return Done(reward, metrics)
    return replace(found, messages=_messages(found), reward=reward, metrics=metrics)


def _messages(found: Observation) -> list[Message]:
    given: object = found.messages
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = list(given) if isinstance(given, Iterable) else []
    texts = [m.get("content") if isinstance(m, dict) else None for m in messages]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(
            "an observation must be a text, or messages with a text as content each, got "
            f"{given!r:.80}"
        )
    others = (None,) if found.new_context else (None, "assistant")
    if any(m.get("role") in others for m in messages):
        raise InputError("a message of an observation needs a role, and not that of the assistant")
    size = sum(len(str(text)) for text in texts)
    if size > MAX_CHARACTERS:
        raise InputError(f"an observation has {size} characters, at most {MAX_CHARACTERS} may be")
    return messages


def _number(name: object, value: object) -> float:
    """Return a number, also one of numpy or torch, and 1 or 0 for a bool."""
    try:
        number = (
            math.nan if isinstance(value, str | bytes | bytearray) else float(cast("Any", value))
        )
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise InputError(f"{name} must be a number up to {LARGEST:g}, got {value!r:.80}")
    return number
