"""An environment behind an OpenEnv server: one session for each episode.

    python -m uvicorn openenv_game:app --port 8000         # a server of openenv-core
    quadriga train … agent.path=examples/agents/openenv_client.py \
        agent.options.url=http://127.0.0.1:8000 agent.reset_tokens=100

What the policy writes is the field `text` of the action, and the field `text` of an observation is
what it sees. Needs `openenv-core`, which cannot be installed beside `quadriga[remote]`.
"""

from __future__ import annotations

from collections.abc import Mapping

from quadriga.agents.environments import Action, Done, Observation


class Environment:
    """A session of the server."""

    def __init__(self, url: str) -> None:
        from openenv.core import GenericEnvClient

        self.client = GenericEnvClient(url)

    async def reset(self, row: Mapping[str, object]) -> Observation:
        await self.client.connect()
        found = await self.client.reset(seed=row.get("seed"))
        return Observation(str(found.observation["text"]))

    async def step(self, action: Action) -> Observation | Done:
        found = await self.client.step({"text": action.text})
        if found.done:
            return Done(found.reward or 0.0)
        return Observation(str(found.observation["text"]), found.reward or 0.0)

    async def close(self) -> None:
        await self.client.close()
