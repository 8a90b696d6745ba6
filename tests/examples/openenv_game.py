"""A server of openenv-core with a game, and three sessions of examples/agents/openenv_client.py.

python openenv_game.py     # of a Python with openenv-core; prints what each session has seen
"""

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import uvicorn
from openenv.core.env_server import (
    Action,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)

from quadriga.agents import environments

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agents"))


class Guess(Action):
    text: str


class Seen(Observation):
    text: str


class Game(Environment[Guess, Seen, State]):
    """The seed of the session is to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **_):
        self.number = seed
        return Seen(text="guess")

    def step(self, action, timeout_s=None, **_):
        right = action.text == str(self.number)
        return Seen(text=f"not {action.text}", reward=1.0 if right else -0.5, done=right)

    @property
    def state(self):
        return State()


async def session(url: str, seed: int) -> list[object]:
    """What a policy sees that counts from 1 on, as (type, text or None, reward)."""
    import openenv_client

    environment = openenv_client.Environment(url)
    seen = [await environment.reset({"seed": seed})]
    while not isinstance(seen[-1], environments.Done):
        seen.append(await environment.step(environments.Action(str(len(seen)), len(seen))))
    await environment.close()
    return [(type(one).__name__, getattr(one, "messages", None), one.reward) for one in seen]


async def main(url: str) -> None:
    print(json.dumps(await asyncio.gather(*(session(url, seed) for seed in (1, 2, 3)))))


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=8)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.02)
    asyncio.run(main(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"))
