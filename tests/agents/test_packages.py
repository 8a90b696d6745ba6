"""Environments of Gymnasium, and tools of MCP servers, with their real packages."""

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

import gymnasium
import psutil
import pytest
import uvicorn
from mcp_server import server

from quadriga.agents.environments import Action, Done, EnvironmentRef, Observation
from quadriga.agents.packages import GymnasiumEnvironment
from quadriga.agents.pool import EpisodePool
from quadriga.agents.tools import with_tools
from quadriga.errors import InputError

STDIO = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
LAKE = """
from quadriga.agents.packages import GymnasiumEnvironment

class Environment(GymnasiumEnvironment):
    id, options = "FrozenLake-v1", {"render_mode": "ansi"}

    def action(self, text):
        return ["left", "down", "right", "up"].index(text.strip())

    def observation(self, observation):
        return self.env.render()

    def close(self):
        super().close()
        open(__file__ + ".closed", "a").write("x")
"""
TOOLS = f"""
from quadriga.agents.packages import mcp_tools
from quadriga.agents.tools import ToolEnvironment

class Environment(ToolEnvironment):
    tools = mcp_tools({STDIO!r})

    async def step(self, action):
        self.call_timeout_s = 2.0 if "seconds" in action.text else 60.0
        return await super().step(action)

    def reward(self, answer):
        return 1.0
"""


class Jack(GymnasiumEnvironment):
    id = "Blackjack-v1"


def test_a_gymnasium_environment_plays_as_the_package_does():
    for seed in range(20):
        ours, theirs, ended = Jack(), gymnasium.make("Blackjack-v1"), False
        assert ours.reset({"seed": seed}) == Observation(str(theirs.reset(seed=seed)[0]))
        assert ours.step(Action("7", 1)).messages == "error: 7 is not in Discrete(2)"
        while not ended:
            observation, reward, ended, _, _ = theirs.step(1)
            found = ours.step(Action(" 1\n", 1))
            assert (isinstance(found, Done), found.reward) == (ended, reward)
            assert ended or found.messages == str(observation)
    first, second = (Jack().seed(row) for row in ({"a": 1, "b": "x"}, {"b": "x", "a": 1}))
    assert first == second != Jack().seed({"a": 2})


@pytest.fixture
def pool(tmp_path):
    """pool(text, options) returns a pool, a function that plays a turn there, and schemas."""
    with contextlib.ExitStack() as stack:

        def make(text, **options):
            (tmp_path / "mine.py").write_text(text)
            ref = EnvironmentRef(str(tmp_path / "mine.py"), "Environment", options).loaded()
            ref, schemas = with_tools(ref, lambda: "hermes")
            own = stack.enter_context(contextlib.closing(EpisodePool(ref, 1)))

            def play(number, *turns):
                acts = [Action(text, turn) for turn, text in enumerate(turns, 1)]
                own.play(number, {"prompt": "a"}, acts)
                while not (found := own.answers()):
                    assert own.wait(60)
                return found[0]

            return own, play, schemas

        yield make


def test_episodes_of_gymnasium_in_a_process_of_the_pool(pool, tmp_path):
    own, play, _ = pool(LAKE, is_slippery=False)
    [shown] = play(0).messages
    assert shown["content"].count("F") == 10
    told = play(0, "fly")
    assert told.messages[0]["content"] == "error: 'fly' is not in list"
    assert told.metrics == {"invalid_actions": 1.0}
    ways = ["fly", "down", "down", "right", "right", "down", "right"]
    answers = [play(0, *ways[:turns]) for turns in range(2, 8)]
    assert [answer.rewards[-1] for answer in answers] == [0, 0, 0, 0, 0, 1]
    assert [answer.status for answer in answers] == ["observed"] * 5 + ["done"]
    own.end(0)
    play(1)
    deadline = time.monotonic() + 60
    while not (closed := tmp_path / "mine.py.closed").exists() or closed.read_text() != "x":
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (LAKE.replace("FrozenLake", "FrozenLakes"), InputError, "FrozenLakes"),
        (TOOLS.replace("mcp_server", "nothing"), InputError, "nothing.py lists no tools: MCPError"),
        (TOOLS.replace(repr(STDIO), '"http://127.0.0.1:9/m"'), InputError, "9/m lists no tools"),
    ],
)
def test_an_environment_that_cannot_start_is_refused_before_the_run(pool, text, error, message):
    with pytest.raises(error, match=message):
        pool(text)


@contextlib.contextmanager
def served(app):
    """Serve an application in a thread of this process; yields its address."""
    own = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=own.run)
    thread.start()
    while not own.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{own.servers[0].sockets[0].getsockname()[1]}"
    own.should_exit = own.force_exit = True
    thread.join()


def turn(*calls):
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "".join(f"<tool_call>\n{body}\n</tool_call>\n" for body in bodies)


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_tools_of_an_mcp_server(transport, pool):
    app = contextlib.nullcontext() if transport == "stdio" else served(server.streamable_http_app())
    with app as url:
        own, play, schemas = pool(TOOLS.replace(repr(STDIO), f"'{url}/mcp'") if url else TOOLS)
        turns = [
            turn(("add", {"a": 1, "b": 2}), ("pid", {})),
            turn(("add", {"a": 13}), ("add", {"a": "x"}), ("add", {"a": 4})),
            turn(("add", {"a": 1, "seconds": 100}), ("add", {"a": 5})),
            turn(("pid", {})),
            *[turn(("add", {"a": 99})), turn(("pid", {}))][: 0 if url else 2],
        ]
        played = (play(0, *turns[: n + 1]).messages for n in range(len(turns)))
        found = [[message["content"] for message in messages] for messages in played]
    functions = [schema["function"] for schema in schemas]
    assert [(f["name"], f["description"]) for f in functions] == [
        ("add", "Add two numbers."), ("pid", "Tell the process."),
    ]  # fmt: skip
    (three, pid), wrong, late, again, *dead = found
    assert three == "3" and "argument a of add" in wrong.pop(1)
    assert wrong == ["error: RuntimeError: Error executing tool add: no 13", "4"]
    assert late == ["error: add exceeded its deadline of 2 s", "5"]
    assert again == [pid], "all calls have one session, also after a deadline"
    if transport == "stdio":
        assert dead[0] == ["error: MCPError: Connection closed"] and dead[1] != [pid]
        process = psutil.Process(int(dead[1][0]))
        own.close()
        assert not psutil.wait_procs([process], 20)[1], "it ends with the process of the pool"
