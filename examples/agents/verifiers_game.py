"""A game as an environment of `verifiers` 0.4, and a program that plays its episodes.

It runs in a Python that has `verifiers`, and knows nothing of Quadriga. A line of its input asks
for an episode, {"id": …, "base_url": …, "api_key": …, "model": …, "row": …}; a line of its output
answers, {"id": …, "reward": …, "error": …}. A row has the fields of `Data`.

    python verifiers_game.py verifiers_game          # the name of an installed environment
"""

import asyncio
import json
import os
import sys

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat", "Game", "Numbers"]
TURNS = 6


class Data(vf.TaskData):
    number: int


class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def won(self, trace: vf.Trace) -> float:
        right = trace.last_reply.strip() == str(self.data.number)
        return 1.0 - 0.1 * trace.num_turns if right else 0.0


class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(1, 10):
            prompt = "Guess a number from 1 to 9."
            yield Task(Data(prompt=prompt, number=number), self.config.task)


class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as game:
            reply = await game.turn()
            for _ in range(TURNS - 1):
                guess = reply.last_reply
                if reply.terminated or guess == str(task.data.number):
                    break
                answer = "a number please"
                if guess.isdigit():
                    answer = "larger" if int(guess) < task.data.number else "smaller"
                reply = await game.turn(answer)


class Chat(vf.Harness[vf.HarnessConfig]):
    """The player: one request for each turn. `verifiers` has others, which run programs."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            messages = [message_to_wire(message) for message in prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=600) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def play(name: str, asked: dict) -> dict:
    """Play an episode of an environment. Its client reads the key in an environment variable."""
    variable = f"KEY_{asked['id']}"
    os.environ[variable] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}}))
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type()(**asked["row"]), env.taskset.config.task)
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(asked["model"], client))
    del os.environ[variable]
    errors = [error.message for one in (episode, *episode.traces) for error in one.errors]
    reward = sum(trace.reward for trace in episode.traces)
    return {"id": asked["id"], "reward": reward, "error": errors[0][:1000] if errors else ""}


async def main(name: str) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what an environment prints is no answer

    async def answer(line: str) -> None:
        print(json.dumps(await play(name, json.loads(line))), file=answers, flush=True)

    async with asyncio.TaskGroup() as episodes:
        while line := await asyncio.to_thread(sys.stdin.readline):
            episodes.create_task(answer(line))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
