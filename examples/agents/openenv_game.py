"""A game behind an OpenEnv server, and what three sessions of it see.

    python -m uvicorn openenv_game:app --port 8000     # in this folder, for openenv_client.py
    python examples/agents/openenv_game.py             # plays three sessions at once, prints JSON

The seed of a session is the number to guess. Needs a Python with `openenv-core`, and Quadriga on
its path.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time

import uvicorn
from openenv.core import env_server
from openenv_client import Environment

from quadriga.agents.environments import Action, Done


class Guess(env_server.Action):
    """What the policy has written."""

    text: str


class Seen(env_server.Observation):
    """What the policy sees."""

    text: str


class Game(env_server.Environment[Guess, Seen, env_server.State]):
    """A session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Seen:
        self.number = seed
        return Seen(text="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Seen:
        right = action.text == str(self.number)
        return Seen(text=f"not {action.text}", reward=1.0 if right else -0.5, done=right)

    @property
    def state(self) -> env_server.State:
        return env_server.State()


app = env_server.create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=64)


async def session(url: str, seed: int) -> list[tuple[str, object, float]]:
    """Return what a policy sees that counts from 1 on: type, text, reward."""
    environment = Environment(url)
    seen = [await environment.reset({"seed": seed})]
    while not isinstance(seen[-1], Done):
        seen.append(await environment.step(Action(str(len(seen)), len(seen))))
    await environment.close()
    return [(type(one).__name__, getattr(one, "messages", None), one.reward) for one in seen]


async def main(url: str) -> None:
    """Play three sessions."""
    print(json.dumps(await asyncio.gather(*(session(url, seed) for seed in (1, 2, 3)))))


if __name__ == "__main__":
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.02)
    asyncio.run(main(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"))
