"""An environment of tools: results, errors, deadlines, and the calls of a turn side by side."""

import asyncio
import json
import threading
import time

import pytest

from quadriga.agents import sandbox
from quadriga.agents.environments import Action, Done, EnvironmentRef
from quadriga.agents.tools import ToolEnvironment, with_tools
from quadriga.errors import ConfigError, InputError, UnknownNameError

RAN = []


def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: the first
        b: the second
    """
    RAN.append(a)
    return a + b


async def wait(seconds: float) -> dict:
    """Wait.

    Args:
        seconds: so long
    """
    await asyncio.sleep(seconds)
    return {"waited": "é"}


def break_off(how: str) -> str:
    """Break.

    Args:
        how: an action
    """
    if how == "exit":
        raise SystemExit
    if how == "loop":
        while True:
            pass
    if how == "flood":
        return "x" * 1000
    return f"{barrier.wait(10)}"


barrier = threading.Barrier(2)


class Calculator(ToolEnvironment):
    tools = (add, wait, break_off)
    call_timeout_s, max_output_chars = 0.5, 60

    def reward(self, answer):  # other episodes go on while it computes
        assert threading.current_thread() is not threading.main_thread()
        return float(answer == self.row["answer"])


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def step(text):
    async def play():
        environment = Calculator()
        assert await environment.reset({"answer": "7"}) is None
        return await environment.step(Action(text, 1))

    return asyncio.run(play())


def results(text):
    found = step(text)
    assert {m["role"] for m in found.messages} == {"tool"}
    return [(m["name"], m["content"]) for m in found.messages], found.metrics


def test_an_episode_ends_with_a_turn_that_calls_nothing():
    assert step("7") == Done(1.0, {"tool_calls": 0.0, "tool_errors": 0.0})
    assert step("8").reward == 0.0


def test_results_come_in_the_order_of_the_calls_which_run_side_by_side():
    text = "I call.\n" + call("wait", seconds=0.1) + call("add", a=3, b=4)
    assert results(text) == (
        [("wait", '{"waited": "é"}'), ("add", "7")], {"tool_calls": 2.0, "tool_errors": 0.0}
    )  # fmt: skip
    met = results(call("break_off", how="meet") * 2)[0]
    assert {content for _, content in met} == {"0", "1"}


ERRORS = {
    call("adds", a=1): ("adds", "error: there is no tool 'adds'; did you mean add?"),
    call("add", a="1"): ("add", "error: argument a of add: '1' is not of type 'integer'"),
    call("add"): ("add", "error: add needs the argument 'a'"),
    call("break_off", how="exit"): ("break_off", "error: SystemExit: "),
    call("break_off", how="loop"): ("break_off", "error: break_off exceeded its deadline of 0.5 s"),
    call("wait", seconds=60): ("wait", "error: wait exceeded its deadline of 0.5 s"),
    "<tool_call>{": ("add", "error: a call must be"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_is_what_the_policy_sees(text):
    before = threading.active_count()
    [(name, content)], metrics = results(text)
    assert (name, metrics["tool_errors"]) == (ERRORS[text][0], 1.0)
    assert content.startswith(ERRORS[text][1]) and len(content) < 300
    deadline = time.monotonic() + 30
    while threading.active_count() > before:  # an endless loop ends too
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_long_results_and_many_calls_are_cut():
    [(_, content)], _ = results(call("break_off", how="flood"))
    assert content == "x" * 60 + "… (1000 characters)"
    RAN.clear()
    found, metrics = results(call("add", a=1) * 40)
    assert (len(RAN), len(found), metrics["tool_calls"]) == (32, 33, 32.0)
    assert found[-1][1].startswith("error: at most 32 calls can be in one turn")


def test_a_malformed_call_beside_others_is_told_and_the_others_run():
    found, metrics = results(call("add", a=1) + "<tool_call>add(1)</tool_call>")
    assert found[0] == ("add", "1") and "not valid JSON" in found[1][1]
    assert metrics == {"tool_calls": 1.0, "tool_errors": 1.0}


FILE = """
from quadriga.agents.tools import ToolEnvironment

def add(a: int):
    '''Add.

    Args:
        a: the first
    '''

class Environment(ToolEnvironment):
    tools = [add]
    def reward(self, answer): return 0.0

class Twice(Environment):
    tools = [add, add]

class NoReward(ToolEnvironment):
    tools = [add]

class Game:
    def reset(self, row): ...
    def step(self, action): ...
"""


@pytest.fixture
def ref(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    return lambda name, **options: EnvironmentRef(str(tmp_path / "mine.py"), name, options)


def test_the_schemas_and_the_format_of_an_environment(ref):
    found, [schema] = with_tools(ref("Environment"), lambda: "llama3")
    assert (found.options, schema["function"]["name"]) == ({"tool_format": "llama3"}, "add")
    given, _ = with_tools(ref("Environment", tool_format="mistral"), lambda: "llama3")
    assert given.options == {"tool_format": "mistral"}
    assert with_tools(ref("Game"), lambda: "llama3") == (ref("Game"), [])


def test_the_python_tool_is_refused_where_nothing_can_be_isolated(ref, tmp_path, monkeypatch):
    text = FILE.replace("tools = [add, add]", "from quadriga.agents.sandbox import python\n    "
                        "tools = [python]")  # fmt: skip
    (tmp_path / "mine.py").write_text(text)

    def refused():
        raise InputError("the system allows no isolation")

    monkeypatch.setattr(sandbox, "check_isolation", refused)
    with pytest.raises(InputError, match="no isolation"):
        with_tools(ref("Twice"), lambda: "hermes")


REFUSED = {
    ("Twice", ""): (ConfigError, "two tools are called 'add'"),
    ("NoReward", ""): (ConfigError, "has no method reward"),
    ("Environment", "hermess"): (UnknownNameError, "did you mean 'hermes'"),
}


@pytest.mark.parametrize(("name", "format"), REFUSED)
def test_an_environment_that_cannot_be_used_is_refused(ref, name, format):
    error, text = REFUSED[name, format]
    with pytest.raises(error, match=text):
        with_tools(ref(name, **({"tool_format": format} if format else {})), lambda: "hermes")
