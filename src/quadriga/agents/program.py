"""A function of the user that plays a whole episode, and asks the policy as often as it needs.

    async def rollout(model, row):
        first = await model.chat([{"role": "user", "content": row["question"]}])
        ...
        return reward                    # or Done(reward, metrics)

A `Program` is the environment that runs such a function: each request is what the policy sees next,
and the turn of the policy is its reply.

    request   [user]                      new context
    request   [user, reply, user]         it continues the conversation: an observation
    request   [other user]                new context, in the same row

A conversation continues if it begins with the messages of the last request and the reply to it. Any
other one begins a new context. Requests that are made at the same time are answered one after the
other.

A program of its own asks through the OpenAI protocol: `model.base_url` and `model.api_key`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from quadriga.agents.endpoint import MODEL_NAME, Endpoint, Reply, endpoint_of_process
from quadriga.agents.environments import Action, Done, Message, Observation, Played
from quadriga.agents.tool_calls import Schema, Tool, ToolFormat, parse_calls
from quadriga.errors import InputError

_ENDED = "the episode has ended"


@dataclass(frozen=True)
class Request(Observation):
    """What a program asks the policy.

    Attributes:
        chat: the whole conversation.
        tools: schemas that the template writes.
        text: to complete, in place of a conversation.
        max_tokens: of the reply; 0: as the settings say.
    """

    chat: Sequence[Message] = ()
    tools: list[Schema] = field(default_factory=list)
    text: str = ""
    max_tokens: int = 0


@dataclass(eq=False)
class Model:
    """The policy, for one episode.

    Attributes:
        name: by which requests over HTTP name it.
    """

    _program: Program
    name: str = MODEL_NAME

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema | Callable[..., Any]] = (),
        max_tokens: int | None = None,
    ) -> Message:
        """Return the reply to a conversation, as a message of the assistant.

        Args:
            tools: schemas, or functions with annotations and a docstring.
            max_tokens: of the reply, rounded up to `rollout.slice_tokens`; None: as the settings
                say.

        Raises:
            InputError: a message has no role, or another content than text; the episode has ended,
                or this is not the event loop of the function.
            ConfigError: a function has no schema, or a schema cannot be used.
        """
        return (await self._program.ask(messages, tools, max_tokens)).message

    @property
    def base_url(self) -> str:
        """The address of an OpenAI-compatible endpoint on loopback, which answers with this policy.

        Raises:
            ConfigError: its packages are not installed.
        """
        return self._program.endpoint().base_url

    @property
    def api_key(self) -> str:
        """The token of this episode."""
        return self._program.endpoint().key_of(self._program)


@dataclass(eq=False)
class _Asked:
    request: Request
    reply: asyncio.Future[Reply]


class Program:
    """The environment of a function.

    Args:
        function: takes a `Model`, the columns of the data row, and `options` by name.
        tool_format: of the calls in a turn; None: the template writes no calls.
    """

    def __init__(self, function: Played, tool_format: str | None, **options: object) -> None:
        self._function, self._format, self._options = function, tool_format, options
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()
        self._current: _Asked | None = None
        self._waiting: set[_Asked] = set()  # requests without a reply
        self._known: list[Message] = []  # the conversation of the context, in one form
        self._tools: list[Schema] = []
        self._task: asyncio.Task[object] | None = None
        self._endpoint: Endpoint | None = None

    async def reset(self, row: Mapping[str, object]) -> Observation:
        """Start the function, and return its first request.

        Raises:
            InputError: it has asked nothing.
        """
        self._task = asyncio.create_task(self._run(row))
        found = await self._next()
        if isinstance(found, Done):
            raise InputError("the function has returned without a request to the model")
        return found

    async def step(self, action: Action) -> Observation | Done:
        """Answer the request with a turn; return the next one, or the end of the episode."""
        asked = self._current
        assert asked is not None
        reply = self._reply(asked.request, action)
        self._known = [*map(_comparable, [*asked.request.chat, reply.message])]
        self._tools = asked.request.tools
        if not asked.reply.done():  # the function has given it up
            asked.reply.set_result(reply)
        return await self._next()

    async def close(self) -> None:
        """End the function. Requests of its programs that wait for a turn are refused, so that
        a program whose episode ends at a limit does not wait for ever."""
        if self._endpoint is not None:
            self._endpoint.forget(self)
        if self._task is not None:
            self._task.cancel()
        for asked in self._waiting:
            if not asked.reply.done():
                asked.reply.set_exception(InputError(_ENDED))

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema | Callable[..., Any]],
        max_tokens: int | None = None,
    ) -> Reply:
        """Ask for the reply to a conversation. Raises as `Model.chat`."""
        own = schemas(tools)
        if own and self._format is None:
            raise InputError("the chat template of the model writes no calls of tools")
        chat = _named([_checked(message) for message in messages])
        if not chat:
            raise InputError("a conversation needs a message")
        most = _most(max_tokens)
        return await self._put(
            Request(chat, new_context=True, chat=chat, tools=own, max_tokens=most)
        )

    async def complete(self, text: str, max_tokens: int | None = None) -> Reply:
        """Ask for what follows a text."""
        if not text:
            raise InputError("a prompt must be a text that is not empty")
        none = [{"role": "user", "content": text}]
        most = _most(max_tokens)
        return await self._put(Request(none, new_context=True, text=text, max_tokens=most))

    def endpoint(self) -> Endpoint:
        """Return the endpoint of this process, which knows this episode."""
        assert self._task is not None
        self._endpoint = self._endpoint or endpoint_of_process(self._task.get_loop())
        self._endpoint.key_of(self)
        return self._endpoint

    async def _run(self, row: Mapping[str, object]) -> object:
        try:
            return await self._function(Model(self), row, **self._options)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the event loop
            raise InputError(f"the function has raised {error!r:.80}") from error

    async def _put(self, request: Request) -> Reply:
        if self._task is None or self._task.done():
            raise InputError(_ENDED)
        loop = asyncio.get_running_loop()
        if loop is not self._task.get_loop():
            text = "model.chat must be awaited in the event loop of the function"
            raise InputError(f"{text}; other threads ask through model.base_url")
        asked = _Asked(request, loop.create_future())
        self._waiting.add(asked)
        self._asked.put_nowait(asked)
        try:
            return await asked.reply
        finally:
            self._waiting.discard(asked)

    async def _next(self) -> Observation | Done:
        """Return the next request, or the end of the function."""
        assert self._task is not None
        while True:
            asking = asyncio.create_task(self._asked.get())
            try:
                await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                asking.cancel()  # unless it is done
            if not asking.done():
                found = await self._task
                return found if isinstance(found, Done) else Done(cast(float, found))
            self._current = asking.result()
            if not self._current.reply.done():
                return self._continued(self._current.request)

    def _continued(self, request: Request) -> Request:
        """Return a request as an observation, if it continues the conversation."""
        known, count = self._known, len(self._known)
        new = request.chat[count:]
        if (
            request.text
            or not known
            or not new
            or any(message["role"] == "assistant" for message in new)
            or [*map(_comparable, request.chat[:count])] != known
            or request.tools != self._tools
        ):
            return request
        return Request(new, chat=request.chat, tools=request.tools, max_tokens=request.max_tokens)

    def _reply(self, request: Request, action: Action) -> Reply:
        if not request.tools:  # `ask` has refused them without a format
            return Reply({"role": "assistant", "content": action.text}, action)
        found, problem, content = parse_calls(action.text, cast("ToolFormat", self._format))
        known = {tool["function"]["name"]: Tool(print, tool) for tool in request.tools}
        calls = list[Message]()
        for number, call in enumerate(found):
            given = known[call.name].given(call) if call.name in known else call.arguments
            function = {"name": call.name, "arguments": json.dumps(dict(given))}
            name = f"call{action.turn:03d}{number:02d}"
            calls.append({"id": name, "type": "function", "function": function})
        content = action.text if problem or not calls else content.strip()
        of_tools = {"tool_calls": calls} if calls else {}
        return Reply({"role": "assistant", "content": content, **of_tools}, action)


def schemas(tools: Sequence[Schema | Callable[..., Any]]) -> list[Schema]:
    """Return the schemas of tools. Raises `ConfigError` as `Tool`."""
    return [(Tool(print, dict(t)) if isinstance(t, Mapping) else Tool.of(t)).schema for t in tools]


def _most(given: object) -> int:
    """Return how many tokens a reply may have; 0: as the settings say."""
    if given is not None and (type(given) is not int or given < 1):
        raise InputError(f"max_tokens must be a count of at least 1, got {given!r:.80}")
    return given or 0


def _checked(message: object) -> Message:
    """Return a message with a text as its content, and only what templates read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"a message must be a dict with a role, got {message!r:.80}")
    content = message.get("content")
    if isinstance(content, list | tuple):  # parts, as the OpenAI protocol has them
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else content
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise InputError(f"the content of a message must be text, got {content!r:.80}")
    found: Message = {"role": message["role"], "content": content}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            found[name] = message[name]
    return found


def _call(call: object) -> dict[str, Any]:
    """Return a call of a tool with its arguments as a dict, which most templates ask for."""
    try:
        given = cast("dict[str, Any]", call)
        function = given["function"]
        arguments = function["arguments"]
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        function = {"name": str(function["name"]), "arguments": dict(found)}
        return {"id": str(given["id"]), "type": "function", "function": function}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"a call of a tool cannot be read: {call!r:.80}") from error


def _named(chat: list[Message]) -> list[Message]:
    """Give the results of tools the names of the tools whose calls they answer."""
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    for message in chat:
        if (name := names.get(message.get("tool_call_id"))) is not None:
            message.setdefault("name", name)
    return chat


def _comparable(message: Message) -> Message:
    """Return what two forms of one message have in common."""
    own = _checked(message)
    calls = [call["function"] for call in own.get("tool_calls", ())]
    return {"role": own["role"], "content": own["content"].strip(), "calls": calls}
