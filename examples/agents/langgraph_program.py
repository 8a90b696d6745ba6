"""An agent of LangGraph with a tool, in a Python of its own. It learns the task of `calculator.py`:
its requests reach the policy through the endpoint, with the token of their episode.

    python -m venv graphs && graphs/bin/pip install langchain==1.5.2 langchain-openai==1.7.4
    LANGGRAPH_PYTHON=graphs/bin/python python examples/agents/langgraph_program.py [steps]

One process plays all episodes of a process that hosts environments: it is this file, started with
the path of a socket.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let an agent answer a question; it asks the policy of an episode."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    asked = json.loads(await reader.readline())
    model = ChatOpenAI(model="policy", base_url=asked["url"], api_key=asked["key"], max_retries=0)
    messages = {"messages": [("user", asked["question"])]}
    try:
        found = await create_agent(model, [multiply]).ainvoke(messages)
        told = {"answer": found["messages"][-1].content}
    except Exception as error:  # told to the episode
        told = {"error": repr(error)}
    writer.write(json.dumps(told).encode() + b"\n")
    writer.close()


async def serve(path: str) -> None:
    """Answer questions at a socket, until standard input ends."""
    import langchain.agents  # noqa: F401  takes seconds
    import langchain_openai  # noqa: F401

    server = await asyncio.start_unix_server(answer, path)
    print("ready", flush=True)
    async with server:
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)


async def start() -> str:
    path = tempfile.mkdtemp(prefix="graphs-") + "/socket"
    start.process = await asyncio.create_subprocess_exec(
        os.environ["LANGGRAPH_PYTHON"], __file__, path, stdin=-1, stdout=-1
    )
    if await start.process.stdout.readline() != b"ready\n":
        raise RuntimeError("the process of LangGraph has ended, see its output")
    return path


started = cache(lambda: asyncio.create_task(start()))


async def rollout(model, row: Mapping[str, object]):
    """Play an episode."""
    from quadriga.agents.environments import Done

    reader, writer = await asyncio.open_unix_connection(await asyncio.shield(started()))
    asked = {"url": model.base_url, "key": model.api_key, "question": row["prompt"]}
    writer.write(json.dumps(asked).encode() + b"\n")
    try:
        told = json.loads(await reader.readline())
    finally:
        writer.close()
    if "error" in told:
        raise RuntimeError(told["error"])
    right = float(told["answer"].strip() == row["answer"])
    return Done(right, {"won": right})


def main(steps: int = 20, warm_steps: int = 200) -> list[dict[str, float]]:
    """Train, and return the metrics of the validations and of the steps."""
    sys.path.insert(0, str(Path(__file__).parent))
    import calculator

    own = {"path": __file__, "name": "rollout", "step_timeout_s": 300, "reset_tokens": 16}
    return calculator.main(steps, 3, warm_steps=warm_steps, **own)


if __name__ == "__main__":
    if "/" in sys.argv[-1] and len(sys.argv) > 1:
        asyncio.run(serve(sys.argv[1]))
    for row in main(*map(int, sys.argv[1:])):
        print({key: row[key] for key in ("step", "val/score", "agent/turns/mean") if key in row})
