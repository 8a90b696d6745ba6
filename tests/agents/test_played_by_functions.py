"""Functions that play whole episodes: requests become turns, contexts and replies."""

import time
from pathlib import Path

import pytest

from quadriga.agents.environments import Action, EnvironmentRef
from quadriga.agents.pool import Answer, EpisodePool
from quadriga.errors import ConfigError

FILE = str(Path(__file__).with_name("programs.py"))


class Policy:
    """Answers the requests of one episode with given texts."""

    def __init__(self, name, tool_format=None, timeout_s=20.0, **options):
        ref = EnvironmentRef(FILE, name, options, tool_format=tool_format).loaded()
        self.pool, self.turns = EpisodePool(ref, 1, timeout_s, tells_chat=True), []

    def answer(self, *texts, name="row", **more) -> Answer:
        self.turns += [
            Action(text, turn, **more) for turn, text in enumerate(texts, len(self.turns) + 1)
        ]
        self.pool.play(0, {"name": name}, self.turns)
        until = time.monotonic() + 60
        while not (found := self.pool.answers()):
            assert time.monotonic() < until
            self.pool.wait(1.0)
        return found[0]


@pytest.fixture
def policy():
    made = []

    def make(*arguments, **options) -> Policy:
        made.append(Policy(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def seen(answer: Answer) -> tuple[list[str], bool]:
    assert answer.status == "observed", answer
    return [message["content"] for message in answer.messages], answer.new_context


def test_a_conversation_goes_on_and_another_one_begins_a_context(policy):
    own = policy("talk")
    assert seen(own.answer()) == (["row"], True)
    assert seen(own.answer("yes")) == (["more"], False)
    assert seen(own.answer("no")) == (["other yes"], True)
    ended = own.answer("four")
    assert (ended.status, ended.rewards, ended.metrics) == ("done", [4.0], {"requests": 3.0})
    # Another process plays the turns again.
    again = policy("talk").answer("yes", "no", "four")
    assert (again.status, again.rewards) == ("done", [0.0, 0.0, 4.0])


def test_requests_at_the_same_time_are_answered_one_after_the_other(policy):
    own = policy("branches")
    assert seen(own.answer()) == (["0"], True)
    assert seen(own.answer("1")) == (["1"], True)
    assert seen(own.answer("2")) == (["2"], True)
    assert own.answer("3").rewards == [123.0]


def test_calls_of_tools_are_read_from_a_turn(policy):
    own = policy("calls", "hermes")
    begun = own.answer()
    assert [tool["function"]["name"] for tool in begun.tools] == ["add"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    found = own.answer(f"<think><tool_call>?</think>So:{call}then")
    assert found.chat[1]["content"] == "<think><tool_call>?</think>So:then"
    assert (found.messages, found.new_context) == (
        [{"role": "tool", "content": "5", "tool_call_id": "call00100", "name": "add"}], False
    )  # fmt: skip
    assert own.answer("5").rewards == [5.0]
    own = policy("calls", "hermes")
    own.answer()
    assert own.answer(f"{call}<tool_call>no").chat[1]["content"] == f"{call}<tool_call>no"
    own = policy("calls", "qwen3_coder")
    own.answer()
    found = own.answer("<tool_call><function=add><parameter=a>2</parameter></function></tool_call>")
    assert found.chat[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert "writes no calls of tools" in policy("calls").answer().detail


@pytest.mark.parametrize(
    ("how", "turns", "status", "words"),
    [
        ("at once", [], "raised", "without a request to the model"),
        ("content", ["a"], "raised", "the content of a message must be text, got 3"),
        ("nothing", ["a"], "raised", "reward must be a number up to 1e+30, got None"),
        ("raise", ["a"], "raised", "ValueError: of the user"),
        ("exit", ["a"], "raised", "the function has raised SystemExit(3)"),
        ("interrupt", ["a"], "raised", "the function has raised KeyboardInterrupt()"),
        ("hang", ["a"], "timed_out", "deadline of 1 s"),
    ],
)
def test_a_failure_of_a_function_is_one_of_its_episode(policy, how, turns, status, words):
    own = policy("fails", how=how, timeout_s=1.0)
    found = own.answer()
    if turns:
        found = own.answer(*turns)
    assert (found.status, words in found.detail) == (status, True), found
    with pytest.raises(ConfigError, match=r"must take \(model, row\) and agent.options"):
        EnvironmentRef(FILE, "fails", {}).loaded()


def test_a_request_that_is_given_up_is_answered_to_nobody(policy):
    own = policy("gives_up")
    assert seen(own.answer()) == (["slow"], True)
    time.sleep(0.3)
    assert own.answer("late").rewards == [0.25]


def test_a_request_that_waits_when_the_episode_ends_is_refused(policy, tmp_path):
    own, file = policy("asks_behind_its_end"), tmp_path / "answer"
    assert seen(own.answer(name=str(file))) == (["a"], True)
    assert seen(own.answer("one")) == (["b"], True)
    own.pool.end(0)
    until = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < until, "the request still waits"
        time.sleep(0.05)
    assert file.read_text().startswith("400") and "the episode has ended" in file.read_text()


def test_the_openai_client_asks_the_policy(policy):
    own = policy("over_http")
    assert seen(own.answer()) == (["first"], True)
    first = own.answer("one", tokens=[("one", -0.5), ("\ufffd", -0.1)], prompt_tokens=7)
    assert seen(first) == (["second"], False)
    tokens = [("t", -0.5), ("wo", -0.1)]
    begun = own.answer("two", finished=False, tokens=tokens, prompt_tokens=9)
    assert (begun.text, begun.new_context) == ("Once", True)
    assert own.answer("three", prompt_tokens=4).text == "Twice"
    assert own.answer("four").rewards == [1.0]
    own = policy("in_a_process")
    assert seen(own.answer()) == (["a"], True) and own.answer("7").rewards == [7.0]


def test_requests_that_cannot_be_answered_are_refused(policy):
    own = policy("refused")
    assert seen(own.answer()) == (["a"], True) and own.answer("x").rewards == [21.0]


@pytest.mark.nightly
def test_a_connection_stays_while_its_program_works(policy):
    own = policy("works_between")
    assert seen(own.answer()) == (["a"], True) and seen(own.answer("1")) == (["b"], True)
    assert own.answer("2").rewards == [1.0]


def test_threads_ask_through_the_endpoint(policy):
    own = policy("in_threads")
    assert seen(own.answer()) == (["a"], True) and seen(own.answer("1")) == (["lost"], True)
    time.sleep(1.0)
    [said], _ = seen(own.answer("2"))
    assert said.startswith("['1', 'late', 'model.chat must be awaited in the event loop")
    assert own.answer("3").rewards == [1.0]
