"""The examples in examples/agents."""

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.agents.environments import Action, Done
from quadriga.agents.tool_calls import Tool
from quadriga.agents.turns import Turns
from quadriga.containment import import_file
from quadriga.models import train_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "agents"


def example(name: str):
    return import_file(FOLDER / f"{name}.py", "example")


def test_the_warm_start_of_the_calculator_has_the_tokens_of_its_episodes():
    calculator = example("calculator")
    tokenizer = train_tokenizer([calculator.CALL % (123, 456), "789 * 10", "multiply a b"])
    tokenizer.chat_template = calculator.TEMPLATE
    tools = [Tool.of(calculator.multiply).schema]
    turns, row = Turns(tokenizer, tools=tools), calculator.problem(random.Random(0))
    question, call, _, answer = calculator.conversation(row, calls=True)["messages"]
    environment = calculator.Environment()

    async def played():
        await environment.reset(row)
        return [await environment.step(Action(m["content"], 1)) for m in (call, answer)]

    observed, done = asyncio.run(played())
    assert done == Done(1.0, {"tool_calls": 0.0, "tool_errors": 0.0})
    written = tokenizer.encode(call["content"])
    ids = turns.prompt_ids([question]) + written
    [more] = turns.following_ids([(written, observed.messages)])
    ids += more + tokenizer.encode(answer["content"])
    whole = tokenizer.apply_chat_template(
        calculator.conversation(row, calls=True)["messages"], tools=tools, tokenize=False
    )
    assert tokenizer.decode(ids) + "<|end|>" == whole


def test_a_model_calls_a_tool_in_a_run():
    *_, row = example("calculator").main(1, warm_steps=50)
    assert row["agent/tool_calls"] > row["agent/tool_errors"] >= 0


@pytest.mark.nightly
def test_a_tool_is_learned():
    scores = [row["val/score"] for row in example("calculator").main(20) if "val/score" in row]
    assert max(scores) > 0.4, "without the tool no answer is right"


@pytest.mark.nightly
def test_a_text_game_is_learned():
    rewards = [row["reward"] for row in example("guess_number").main()]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 1.0


def test_credit_by_turn_beats_credit_by_game(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    trained = import_file(FOLDER.parents[1] / "benchmarks" / "turn_credit.py", "credit").train
    turns, games = ([sum(trained(name, s)[15:20]) for s in (0, 1)] for name in ("gigpo", "grpo"))
    assert min(turns) > max(games)


def python_with(folder, *packages):
    """Make an environment for packages that exclude what Quadriga needs; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "-qq", *packages], check=True)
    return str(folder / "bin" / "python")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["openai_program", "verifiers_environment", "langgraph_program"])
def test_a_program_of_its_own_is_trained(name, tmp_path, monkeypatch):
    if name == "verifiers_environment":
        monkeypatch.setenv("VERIFIERS_PYTHON", python_with(tmp_path, "verifiers==0.4.0"))
    if name == "langgraph_program":
        packages = "langchain==1.5.2", "langchain-openai==1.7.4"
        monkeypatch.setenv("LANGGRAPH_PYTHON", python_with(tmp_path, *packages))
    rows = [row for row in example(name).main(2) if "agent/won" in row]
    assert len(rows) == 2 and all(row["agent/turns/mean"] > 1 for row in rows)
    assert all(row["agent/raised"] == 0 and row["agent/contexts"] == 1 for row in rows)


@pytest.mark.nightly
def test_sessions_of_openenv(tmp_path):
    """Three sessions at once, each of whose seed is to be guessed by counting."""
    command = [python_with(tmp_path, "openenv-core==0.3.0"), FOLDER / "openenv_game.py"]
    source = {"PYTHONPATH": str(FOLDER.parents[1] / "src")}
    out = subprocess.check_output(command, env=os.environ | source, timeout=120)
    first, right = ["Observation", "guess", 0.0], ["Done", None, 1.0]
    wrong = [["Observation", f"not {n}", -0.5] for n in (1, 2)]
    assert json.loads(out) == [[first, *wrong[:n], right] for n in range(3)]
