"""What a tool is, and how calls of tools are read from a turn of the policy.

A tool is a function with a JSON schema of its arguments. The schema of a Python function comes from
its annotations and its docstring, as `transformers.utils.get_json_schema` reads them.

A model calls tools in the format that its chat template writes calls in:

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>   also Qwen
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    llama3        {"name": "add", "parameters": {"a": 1}}                         a whole turn
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
    harmony       <|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>   gpt-oss

What a policy writes is never run or imported, and a call that cannot be read is a text that tells
the policy why.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from quadriga.agents.turns import MARKER, QUESTION, invented_turn
from quadriga.containment import cut, describe
from quadriga.data.chat import chat_texts
from quadriga.errors import ConfigError, ModelError, nearest_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolFormat = Literal["harmony", "qwen3_coder", "hermes", "mistral", "llama3"]
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)
Schema = dict[str, Any]

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_DETAIL = 300  # characters of what is wrong with a call


@dataclass(frozen=True)
class ToolCall:
    """A call that a policy has written.

    Attributes:
        typed: the arguments are JSON values; otherwise they are texts (`qwen3_coder`).
    """

    name: str
    arguments: Mapping[str, Any]
    typed: bool = True


@dataclass(frozen=True)
class Tool:
    """A function that a policy can call.

    Args:
        function: takes the arguments by name; it may be a coroutine function.
        schema: `{"type": "function", "function": {"name", "description", "parameters"}}`.

    Raises:
        ConfigError: the schema has no name, is no JSON, or its parameters are no JSON schema.
    """

    function: Callable[..., Any]
    schema: Schema = field(repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Return the tool of a Python function. Raises `ConfigError` if it has no schema."""
        from transformers.utils.chat_template_utils import get_json_schema

        name = getattr(function, "__name__", repr(function))
        try:
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise TypeError(f"its parameter {parameter} cannot be given by name")
            schema = get_json_schema(function)
        except Exception as error:  # annotations and docstrings of the user can be anything
            raise ConfigError(
                f"the tool {name} has no schema: {' '.join(str(error).split())}; annotate its "
                "parameters, and describe each under 'Args:' in its docstring",
                key="agent.path",
            ) from error
        return cls(function, schema)

    def __post_init__(self) -> None:
        from jsonschema import Draft202012Validator

        function = self.schema.get("function")
        name = function.get("name") if isinstance(function, dict) else function
        said = f"the schema of the tool {name!r:.80}"
        try:
            text = json.dumps(self.schema, allow_nan=False)
            Draft202012Validator.check_schema(self.parameters)
            if found := re.search(r'"\$ref": "(?!#)[^"]*"', text):
                raise ValueError(f"{found[0]} is not part of it")
            if not _NAME.fullmatch(self.name):
                raise ValueError("a name has at most 64 letters, digits, '_', '.' and '-'")
        except Exception as error:  # a dict of the user can hold anything
            problem = getattr(error, "message", None) or describe(error)
            raise ConfigError(f"{said} cannot be used: {problem:.300}", key="agent.path") from error

    @property
    def name(self) -> str:
        """The name by which it is called."""
        return str(self.schema["function"]["name"])

    @property
    def parameters(self) -> Schema:
        """The JSON schema of its arguments."""
        return cast(Schema, self.schema["function"].get("parameters") or {"type": "object"})

    @cached_property
    def _validator(self) -> Any:  # jsonschema has no annotations
        from jsonschema import Draft202012Validator
        from referencing import Registry

        return Draft202012Validator(self.parameters, registry=Registry())  # fetches no addresses

    @property
    def _properties(self) -> dict[str, dict[str, Any]]:
        properties = self.parameters.get("properties", {})
        return {k: v if isinstance(v, dict) else {} for k, v in properties.items()}

    def given(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments of a call as JSON values, unchecked."""
        given, known = dict(call.arguments), self._properties
        return given if call.typed else {k: _typed(v, known.get(k, {})) for k, v in given.items()}

    def arguments_of(self, call: ToolCall) -> dict[str, Any] | str:
        """Return the arguments of a call, or what is wrong with them."""
        known, given = self._properties, self.given(call)
        closed = self.parameters.get("additionalProperties", False) is False
        if closed and (unknown := set(given) - set(known)):
            name = min(unknown)
            near = nearest_name(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known) or 'none'}"
            return f"unknown argument {name!r:.80} of {self.name}; {hint}"
        # transformers writes `int | None` as {"type": "integer", "nullable": true}
        checked = {
            name: value
            for name, value in given.items()
            if value is not None or not known.get(name, {}).get("nullable")
        }
        needed = self.parameters.get("required", [])
        if missing := [name for name in needed if name not in given]:
            return f"{self.name} needs the argument {missing[0]!r}"
        without = {**self.parameters, "required": []}
        try:
            errors = sorted(
                self._validator.evolve(schema=without).iter_errors(checked),
                key=lambda error: list(map(str, error.absolute_path)),
            )
        except Exception as error:  # references of a schema that lead nowhere, or in a circle
            return f"the arguments of {self.name} cannot be checked: {describe(error):.{_DETAIL}}"
        if errors:
            place = ".".join(map(str, errors[0].absolute_path))
            return f"argument {place} of {self.name}: {errors[0].message:.{_DETAIL}}"
        return given


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument that was written as a text in the type of its schema, if it has it."""
    types = schema.get("type", "string")
    if "string" in ([types] if isinstance(types, str) else types):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tools_by_name(tools: Iterable[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    """Return tools, or Python functions as tools, by their names.

    Raises:
        ConfigError: a function has no schema, or two tools have one name.
    """
    found: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool.of(given)
        if tool.name in found:
            text = f"two tools are called {tool.name!r}; rename one of them"
            raise ConfigError(text, key="agent.path")
        found[tool.name] = tool
    return found


def call_format(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format in which the chat template of a tokenizer writes calls of tools.

    Raises:
        ConfigError: it is none of those that can be read.
    """
    for form in (0, 1):
        turn = invented_turn(form)
        try:
            [start, whole] = [
                chat_texts(tokenizer, [[QUESTION]])[0],
                chat_texts(tokenizer, [[QUESTION, turn]], complete=True)[0],
            ]
        except ModelError:
            continue
        behind = whole.partition(str(QUESTION["content"]))[2]
        own = whole.removeprefix(start) if whole.startswith(start) else behind
        for name, parse in _PARSERS.items():
            calls = [found for found, *_ in parse(own) if isinstance(found, ToolCall)]
            if [(c.name, c.arguments) for c in calls] == [("probe", {"value": MARKER})]:
                return name
    raise ConfigError(
        f"the chat template of the tokenizer {str(tokenizer.name_or_path)!r} writes calls of tools "
        f"in none of the formats {', '.join(_PARSERS)}; set agent.options.tool_format to that "
        "which the model writes",
        key="agent.options.tool_format",
    )


class Parsed(NamedTuple):
    """What a turn consists of.

    Attributes:
        problem: what is wrong with the first call that cannot be read.
        content: the text without the calls.
    """

    calls: list[ToolCall]
    problem: str | None
    content: str


def parse_calls(text: str, format: ToolFormat) -> Parsed:
    """Return the calls in the text of a turn, without those in thoughts: up to the first `</think>`
    that no `<think>` opens, and behind each `<think>`, to its end. A word in a call is text, but
    not a special token of harmony."""
    found, thoughts, opened = list(_PARSERS[format](text)), list[tuple[int, int]](), -1
    calls = [(first, last) for each, first, last in found if isinstance(each, ToolCall)]
    for word in re.finditer(r"<(/?)think>|\[(/?)THINK\]", text):
        if any(first < word.start() < last for first, last in calls):
            continue
        if not (word[1] or word[2]):
            opened = word.start() if opened < 0 else opened
        elif opened >= 0 or not thoughts:
            thoughts.append((max(opened, 0), word.end()))
            opened = -1
    if opened >= 0:
        thoughts.append((opened, len(text)))
    found = [one for one in found if not any(a <= one[1] < b for a, b in thoughts)]
    content, at = "", 0
    for _, first, last in found:
        content, at = content + text[at:first], last
    problem = next((each for each, *_ in found if isinstance(each, str)), None)
    own = [each for each, *_ in found if isinstance(each, ToolCall)]
    return Parsed(own, problem, content + text[at:])


Found = Iterable[tuple[ToolCall | str, int, int]]
"""Calls, or what is wrong with one that cannot be read; and where each begins and ends."""


def _call_of(value: object) -> ToolCall | str:
    """Return the call that a JSON value describes."""
    if isinstance(value, dict) and isinstance(name := value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json_at(arguments.strip(), 0)[0]
        if isinstance(arguments, dict):
            return ToolCall(name, arguments)
        return f"the arguments of {name!r:.80} must be a JSON object, got {arguments!r:.80}"
    return f'a call must be {{"name": …, "arguments": {{…}}}}, got {value!r:.80}'


@dataclass(frozen=True)
class _NoJson:
    """Why a text is no JSON."""

    why: str

    def __repr__(self) -> str:
        return self.why


def _json_at(text: str, start: int) -> tuple[object, int]:
    """Return the JSON value at a place of a text, or a `_NoJson`, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except ValueError as error:
        got = cut(text[start : start + 99], 80)
        return _NoJson(f"{got!r}, which is not valid JSON: {error}"), len(text)
    except RecursionError:
        return _NoJson("JSON that is nested too deeply"), len(text)


def _hermes(text: str) -> Found:
    last = 0
    while begun := re.compile(r"<tool_call>\s*").search(text, last):
        value, end = _json_at(text, begun.end())
        # A text in the JSON may have the word that ends a call.
        end = begun.end() if isinstance(value, _NoJson) else end
        closed = re.compile(r"(?:(?!<tool_call>).)*?</tool_call>", re.DOTALL).match(text, end)
        last = closed.end() if closed else end
        yield _call_of(value), begun.start(), last


_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]{1,200})>\n?(.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=[^>\n]{1,200}>|</function>|</tool_call>|\Z))",
    re.DOTALL,
)
"""An argument ends before another one or the end of the call, so its text may have these words."""


def _qwen3_coder(text: str) -> Found:
    last = 0
    while begun := re.compile(r"<tool_call>\s*(<function=([^>\n]{1,200})>)?").search(text, last):
        arguments, last = dict[str, str](), begun.end()
        while argument := _PARAMETER.match(text, last):
            arguments[argument[1]], last = argument[2], argument.end()
        ended = re.compile(r"\s*(?:</function>(?:\s*</tool_call>)?|</tool_call>)").match(text, last)
        if begun[1] is not None and ended is not None:
            last = ended.end()
            yield ToolCall(begun[2], arguments, typed=False), begun.start(), last
            continue
        inside = re.compile(r"\s*<parameter=").match(text, last) is not None
        must = (
            "an argument must end with </parameter>"
            if inside
            else "a call must end with </function>"
        )
        must = must if begun[1] else "a call must begin with <function=NAME>"
        yield f"{must}, got {cut(text[last:].strip(), 80)!r}", begun.start(), last


def _llama3(text: str) -> Found:
    at, brace = text.find("<|python_tag|>"), text.find("{")
    tag = "<|python_tag|>" if at >= 0 and not 0 <= brace < at else ""
    thought = len(text) - len(text.rpartition("</think>")[2])
    first = at if tag else 0 if brace == _behind_space(text, 0) else thought
    start = _behind_space(text, first + len(tag))
    while text.startswith("{", start):
        value, end = _json_at(text, start)
        keys = {*value} if isinstance(value, dict) else set[str]()
        if not (keys == {"name"} or {"parameters", "arguments"} & keys) and not tag:
            if re.match(r'\{\s*"name"\s*:', text[start:]) and not isinstance(value, dict):
                yield _call_of(value), first, end
            return  # an answer in JSON
        start = _behind_space(text, end, "; \n")
        yield _call_of(value), first, start
        first, tag = start, ""
    if tag:
        yield f"a call must begin with {{, got {cut(text[start:], 80)!r}", first, len(text)


def _behind_space(text: str, start: int, space: str | None = None) -> int:
    return len(text) - len(text[start:].lstrip(space))


def _mistral(text: str) -> Found:
    end = 0
    for mark in re.finditer(r"\[TOOL_CALLS\]", text):
        if mark.start() < end:  # in an argument
            continue
        head = re.compile(r"\s*([\w.-]{1,200})?(?:\[CALL_ID\]\w{1,200})?(?:\[ARGS\])?\s*").match(
            text, mark.end()
        )
        assert head is not None  # every part of it may be missing
        value, end = _json_at(text, head.end())
        end = head.end() if isinstance(value, _NoJson) else end
        if head[1] is not None:  # NAME{…} or NAME[ARGS]{…}
            value = {"name": head[1], "arguments": value}
        for each in value if isinstance(value, list) else [value]:
            yield _call_of(each), mark.start(), end


def _harmony(text: str) -> Found:
    for message in re.finditer(r"(?:<\|start\|>|\A).*?(?=<\|start\|>|\Z)", text, re.DOTALL):
        header, begun, body = message[0].partition("<|message|>")
        recipient = re.search(r"\bto=(?:functions\.)?([\w.-]{1,200})", header)
        if recipient is None or recipient[1] == "assistant":
            continue
        own, *more = re.split(r"(<\|(?:call|end|return)\|>)", body, maxsplit=1)
        value = _json_at(own.strip(), 0)[0] if begun else _NoJson("a call without <|message|>")
        last = message.end() - len("".join(more[1:]))
        yield _call_of({"name": recipient[1], "arguments": value}), message.start(), last


_PARSERS: dict[ToolFormat, Callable[[str], Found]] = {
    "harmony": _harmony,
    "qwen3_coder": _qwen3_coder,
    "hermes": _hermes,
    "mistral": _mistral,
    "llama3": _llama3,
}
