"""`ToolEnvironment`: an environment that runs the tools that the policy calls.

class Environment(ToolEnvironment):
    tools = [add, search]                # Python functions, or `Tool`s

    def reward(self, answer):            # of the turn in which it calls no tool
        return float(answer.strip() == self.row["answer"])
"""

import asyncio
import inspect
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from quadriga.agents import sandbox, tool_calls
from quadriga.agents.environments import Action, Done, EnvironmentRef, Message, Observation
from quadriga.containment import code_runs, cut, describe
from quadriga.data.chat import raise_in
from quadriga.errors import ConfigError, nearest_name, unknown_name

_MAX_CALLS = 32  # in one turn


class ToolEnvironment(ABC):
    """Runs the tools that the policy calls in a turn, and ends with a turn that calls none.

    The calls of a turn run side by side: coroutine functions in the loop of the process, others in
    threads. What a tool raises, a call that cannot be read and arguments that do not fit are texts
    that the policy sees.

    Args:
        tool_format: in which the policy writes calls; the run finds it in the chat template.

    Attributes:
        tools: functions with annotations and a docstring, or `Tool`s.
        call_timeout_s: deadline of a call.
        max_output_chars: the result of a call is cut to so many characters.
        row: the columns of the data row.
    """

    tools: ClassVar[Sequence[tool_calls.Tool | Callable[..., Any]]] = ()
    call_timeout_s: ClassVar[float] = 30.0
    max_output_chars: ClassVar[int] = 8000

    row: Mapping[str, Any]

    def __init__(self, tool_format: tool_calls.ToolFormat = "hermes") -> None:
        self._format = tool_format
        self._tools = tool_calls.tools_by_name(self.tools)

    @abstractmethod
    def reward(self, answer: str) -> float:
        """Return the reward of an episode. `answer`: its last turn, which calls no tool."""

    async def reset(self, row: Mapping[str, object]) -> Observation | None:
        """Begin the episode of a data row."""
        self.row = row
        return None

    async def step(self, action: Action) -> Observation | Done:
        """Run the calls of a turn, or end the episode if it has none."""
        calls, problem, _ = tool_calls.parse_calls(action.text, self._format)
        if not calls and problem is None:
            found = await asyncio.to_thread(self.reward, action.text)
            reward = await found if inspect.isawaitable(found) else found
            return Done(reward, {"tool_calls": 0.0, "tool_errors": 0.0})
        if len(calls) > _MAX_CALLS:
            problem = f"at most {_MAX_CALLS} calls can be in one turn; the others were not run"
        results = await asyncio.gather(*map(self._result, calls[:_MAX_CALLS]))
        messages = [message for message, _ in results]
        errors = sum(failed for _, failed in results)
        if problem is not None:
            name = calls[0].name if calls else next(iter(self._tools))
            messages.append(_message(name, f"error: {problem}"))
            errors += 1
        metrics = {"tool_calls": float(len(results)), "tool_errors": float(errors)}
        return Observation(messages, metrics=metrics)

    async def _result(self, call: tool_calls.ToolCall) -> tuple[Message, bool]:
        """Run a call. Return the message of its result, and whether it failed."""
        text, failed = await self._run(call)
        return _message(call.name, cut(text, self.max_output_chars)), failed

    async def _run(self, call: tool_calls.ToolCall) -> tuple[str, bool]:
        tool = self._tools.get(call.name)
        if tool is None:
            near = nearest_name(call.name, self._tools)
            hint = f"did you mean {near}?" if near else f"the tools are {', '.join(self._tools)}"
            return f"error: there is no tool {call.name!r:.80}; {hint}", True
        arguments = tool.arguments_of(call)
        if isinstance(arguments, str):
            return f"error: {arguments}", True
        try:
            async with asyncio.timeout(self.call_timeout_s):
                if inspect.iscoroutinefunction(tool.function):
                    return _text(await tool.function(**arguments)), False
                return await _in_thread(lambda: _text(tool.function(**arguments)))
        except TimeoutError:
            return f"error: {call.name} exceeded its deadline of {self.call_timeout_s:g} s", True
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a tool may raise anything, also SystemExit
            return f"error: {describe(error)}", True


def _message(name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "content": content}


def _text(value: object) -> str:
    """Return the result of a tool as a text: JSON, if it is none."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


async def _in_thread(call: Callable[[], str]) -> tuple[str, bool]:
    """Run a call in a thread of its own; return its result, and whether it has raised.

    A call that is given up gets a SystemExit, so that an endless loop in Python ends.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[str, bool]] = loop.create_future()

    def settle(outcome: tuple[str, bool]) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def run() -> None:
        try:
            outcome = call(), False
        except BaseException as error:  # told to the policy
            outcome = f"error: {describe(error)}", True
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return await ended
    except asyncio.CancelledError:
        if thread.is_alive() and thread.ident is not None:
            raise_in(thread.ident, SystemExit)
        raise


def with_tools(
    ref: EnvironmentRef, find_format: Callable[[], tool_calls.ToolFormat]
) -> tuple[EnvironmentRef, list[tool_calls.Schema]]:
    """Return an environment that knows the format of calls, and the schemas of its tools.

    Args:
        find_format: called if the options name none.

    Raises:
        InputError: the class cannot be loaded, see `EnvironmentRef.load`; or it has the tool
            `sandbox.python`, and the system allows no isolation.
        ConfigError: it lacks a method, such as `reward`, or its tools cannot be used.
    """
    if not code_runs():
        return ref, []
    found = ref.load()
    if not inspect.isclass(found):  # a function
        with suppress(ConfigError):  # a request with tools is refused then
            ref = replace(ref, tool_format=find_format())
        return ref, []
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        text = f"agent.name={ref.name} of agent.path={ref.path} has no method {missing[0]}"
        raise ConfigError(text, key="agent.path")
    if not issubclass(found, ToolEnvironment):
        return ref, []
    given = ref.options.get("tool_format") or find_format()
    if given not in tool_calls.FORMATS:
        raise unknown_name("format of agent.options.tool_format", given, tool_calls.FORMATS)
    tools = tool_calls.tools_by_name(found.tools).values()
    if any(tool.function is sandbox.python for tool in tools):
        sandbox.check_isolation()
    return replace(ref, options={**ref.options, "tool_format": given}), [t.schema for t in tools]
