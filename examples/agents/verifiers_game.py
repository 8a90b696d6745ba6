"""The game of `guess_number.py` as an environment of `verifiers` 0.4, and a server that plays it:
a line of JSON asks for an episode, a line answers. It knows nothing of Quadriga."""

import asyncio
import json
import os
import sys

import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Chat", "Game", "Numbers"]


class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def won(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.id)


class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):  # an evaluation by `verifiers` plays these games
        yield Task(vf.TaskData(id="5", prompt="Guess a number from 1 to 9."), self.config.task)


class Game(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as game:
            reply, number, left = await game.turn(), task.data.id, "123456789"
            while not reply.terminated and (guess := reply.last_reply) != number:
                left = [n for n in left if (n < guess) == (number < guess) and n != guess]
                reply = await game.turn(f"{left[0]} to {left[-1]}")


class Chat(vf.Harness[vf.HarnessConfig]):  # the player, which asks for each turn
    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [message_to_wire(message) for message in data.prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=600) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def answer(reader, writer):
    asked = json.loads(await reader.readline())
    chosen = {"taskset": {"id": "verifiers_game"}, "agent": {"runtime": {"type": "subprocess"}}}
    env = vf.load_environment(vf.resolve_env_config(chosen))
    os.environ[asked["key"]] = asked["key"]  # the client reads its key there
    client = vf.EvalClientConfig(base_url=asked["url"], api_key_var=asked["key"])
    async with env.serving():
        task = Task(vf.TaskData(**asked["data"]), env.taskset.config.task)
        episode = await env.run_episode(task, vf.ModelContext("policy", client))
    errors = [error.message for one in (episode, *episode.traces) for error in one.errors]
    found = {"reward": sum(trace.reward for trace in episode.traces), "errors": errors}
    writer.write(json.dumps(found).encode() + b"\n")


async def main():
    async with await asyncio.start_unix_server(answer, sys.argv[1]):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the process that has started it ends


if __name__ == "__main__":
    asyncio.run(main())
