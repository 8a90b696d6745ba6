"""Schemas of tools, and calls of tools in the formats of five families. No text of a policy raises
an error or runs."""

import json

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hypothesis import given, settings, strategies as st

from quadriga.agents.tool_calls import (
    _PARSERS,
    Tool,
    ToolCall,
    call_format,
    parse_calls,
    tools_by_name,
)
from quadriga.errors import ConfigError


def read(text, format):
    return parse_calls(text, format)[:2]


def search(query: str, limit: int | None = None, tags: list[str] = ()) -> str:
    """Search.

    Args:
        query: the words
        limit: of the results
        tags: which they have
    """
    return query


def schema(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "f", "parameters": {"a": 1}}; ',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "call00000"}]',
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": 1}<|call|>',
}


@pytest.mark.parametrize("format", WRITTEN)
def test_calls_are_read_in_their_order(format):
    text = ("" if format == "llama3" else "I call it.\n") + WRITTEN[format]
    expected = ToolCall("f", {"a": "1" if format == "qwen3_coder" else 1}, format != "qwen3_coder")
    assert read(text, format) == ([expected], None)
    assert read(text + WRITTEN[format], format) == ([expected] * 2, None)
    assert read("I do not.", format) == ([], None)
    thought = f"<think>{WRITTEN[format]}</think>\nI do not."
    for without in (thought, f"<think>Or {WRITTEN[format]}"):  # the second one is cut
        assert parse_calls(without, format) == ([], None, without)
    around = f"{thought}{WRITTEN[format]}So."
    if format != "llama3":
        assert parse_calls(around, format).content in (f"{thought}So.", thought)


def test_other_ways_to_write_a_call():
    f = [ToolCall("f", {"a": 1})]
    assert read('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "llama3") == (f, None)
    assert read('{"name": "Ann", "age": 3}', "llama3") == ([], None)
    assert read('{"name": "now"}', "llama3") == ([ToolCall("now", {})], None)
    assert read('[TOOL_CALLS]g{"a": 1[TOOL_CALLS]f{"a": 1}', "mistral")[0] == f
    assert read(WRITTEN["qwen3_coder"].replace("</function>", ""), "qwen3_coder")[1] is None
    assert read('[TOOL_CALLS]f{"a": 1}', "mistral") == (f, None)
    assert read('[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}', "mistral") == (f, None)
    named = [ToolCall("f", {"a": "[TOOL_CALLS]"})]
    assert read('[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}', "mistral") == (named, None)
    pair = json.dumps([{"name": "f", "arguments": {"a": 1}}] * 2)
    assert read(f"[TOOL_CALLS]{pair}", "mistral") == (f * 2, None)
    inner = (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}'  # JSON in JSON; cut at the limit
    )
    assert read(inner, "hermes") == (f, None)
    tagged = ToolCall("f", {"a": "</tool_call>"})
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': tagged.arguments})}</tool_call>"
    assert parse_calls(f"So{text}\n{inner} it", "hermes") == ([tagged, *f], None, "So\n it")
    call, words = WRITTEN["hermes"], "</tool_call>\n</function>\n</parameter>\n<think>"
    assert read(f"<think>a</think>{call}<think>b</think>{call}", "hermes") == (f * 2, None)
    assert read('[THINK]no [TOOL_CALLS]f{"a": 1}[/THINK]No.', "mistral") == ([], None)
    for format, written in (("hermes", json.dumps(words)), ("qwen3_coder", words)):
        [found], problem, _ = parse_calls(WRITTEN[format].replace("1", written), format)
        assert (found.arguments, problem) == ({"a": words}, None)
    header = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert read(f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}",
                       "harmony") == (f, None)  # fmt: skip


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "not valid JSON"),
    ("hermes", "<tool_call>[1]</tool_call>", "a call must be"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be a JSON object"),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "a call must be"),
    ("hermes", "<tool_call>" + "[" * 100_000, "nested too deeply"),
    ("qwen3_coder", "<tool_call>{}</tool_call>", "must begin with <function=NAME>"),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "must end with </parameter>"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}', "not valid JSON"),
    ("llama3", "<|python_tag|>print(1)", "a call must begin with {"),
    ("mistral", "[TOOL_CALLS][1", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=functions.f", "a call without <|message|>"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>a=1<|call|>", "not valid JSON"),
]


@pytest.mark.parametrize(("format", "text", "problem"), MALFORMED)
def test_a_malformed_call_is_explained_in_one_line(format, text, problem):
    calls, found = read(text, format)
    assert (calls, "\n" in found, problem in found) == ([], False, True)
    assert len(found) < 400


PIECES = [piece for text in WRITTEN.values() for piece in (text, *text.split("{"))]
PIECES += ["<think>", "</think>", "<|python_tag|>", '{"name": ', "__import__('os')"]
PIECES += [*'{}["', "\\u"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join))
def test_no_text_of_a_policy_raises(text):
    tool = Tool.of(search)
    for format in WRITTEN:
        calls, problem = read(text, format)
        assert problem is None or isinstance(problem, str)
        assert all(isinstance(tool.arguments_of(call), dict | str) for call in calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(), VALUES, max_size=4),
    st.sampled_from(["hermes", "mistral", "harmony"]),
)
def test_every_json_value_arrives_as_it_was_written(arguments, format):
    one = json.dumps({"name": "f", "arguments": arguments})
    text = {"hermes": f"<tool_call>{one}</tool_call>", "mistral": f"[TOOL_CALLS][{one}]"}
    text["harmony"] = f" to=functions.f<|message|>{json.dumps(arguments)}<|call|>"
    if not any(mark in one for mark in ("<", "[TOOL_CALLS]")):
        assert read(text[format], format) == ([ToolCall("f", arguments)], None)


CHECKED = [
    ({"query": "a", "limit": None}, None),
    ({"query": "a", "tags": ["b"]}, None),
    ({"query": 3}, "argument query of search: 3 is not of type 'string'"),
    ({"query": "a", "tags": ["b", 1]}, "argument tags.1 of search: 1 is not of type 'string'"),
    ({"query": "a", "limit": "3"}, "argument limit of search: '3' is not of type 'integer'"),
    ({"query": "a", "limit": True}, "argument limit of search: True is not of type 'integer'"),
    ({"limit": 3}, "search needs the argument 'query'"),
    ({"query": "a", "limits": 3}, "unknown argument 'limits' of search; did you mean 'limit'?"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "problem"), CHECKED)
def test_arguments_are_checked_against_the_schema(arguments, problem):
    assert Tool.of(search).arguments_of(ToolCall("search", arguments)) == (problem or arguments)


def test_texts_become_the_types_of_the_schema():
    call = ToolCall("search", {"query": "3", "limit": "3", "tags": '["b"]'}, typed=False)
    assert Tool.of(search).arguments_of(call) == {"query": "3", "limit": 3, "tags": ["b"]}
    wrong = Tool.of(search).arguments_of(ToolCall("search", {"query": "", "limit": "x"}, False))
    assert "is not of type 'integer'" in wrong


def no_docstring(a: int):
    return a


def no_annotation(a):
    """Do.

    Args:
        a: this
    """


def any_names(**options: int):
    """Do.

    Args:
        options: all
    """


REFUSED = [
    (no_docstring, "no docstring"),
    (no_annotation, "missing a type hint"),
    (any_names, "cannot be given by name"),
    (Tool.of(search), "two tools are called 'search'"),
]


@pytest.mark.parametrize(("function", "text"), REFUSED)
def test_a_function_without_a_schema_and_a_second_name_are_refused(function, text):
    with pytest.raises(ConfigError, match=text) as found:
        tools_by_name([search, function])
    assert "\n" not in str(found.value)


SCHEMAS = [
    ({}, "None"),
    (schema("two words"), "at most 64 letters"),
    (schema(type="object", properties={"a": {"type": "int"}}), "'int' is not valid"),
    (schema(type="object", properties={"a": {"enum": {1}}}), "not JSON serializable"),
    (schema(type="object", properties={"a": {"$ref": "http://127.0.0.1/a"}}), "is not part of it"),
]


@pytest.mark.parametrize(("given", "text"), SCHEMAS)
def test_a_schema_that_cannot_be_written_is_refused(given, text):
    with pytest.raises(ConfigError, match=text):
        Tool(search, given)


def test_a_schema_with_open_arguments_and_with_lost_references():
    tool = Tool(search, schema(type="object", additionalProperties={"type": "integer"}))
    assert tool.arguments_of(ToolCall("f", {"a": 1})) == {"a": 1}
    assert "is not of type 'integer'" in tool.arguments_of(ToolCall("f", {"a": "1"}))
    lost = Tool(search, schema(type="object", properties={"a": {"$ref": "#/$defs/b"}}))
    assert "cannot be checked" in lost.arguments_of(ToolCall("f", {"a": 1}))


FORMATS = {
    "Qwen2.5": "hermes", "Qwen3": "hermes", "Hermes": "hermes", "Qwen3-Coder": "qwen3_coder",
    "Llama 3": "llama3", "Mistral": "mistral", "gpt-oss": "harmony",
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_that_which_the_template_writes(name):
    tokenizer = tokenizer_of(name)
    if name in FORMATS:
        assert call_format(tokenizer) == FORMATS[name]
    else:
        with pytest.raises(ConfigError, match=r"set agent\.options\.tool_format"):
            call_format(tokenizer)


def test_every_format_is_tried():
    assert set(WRITTEN) == set(_PARSERS) == set(FORMATS.values())
