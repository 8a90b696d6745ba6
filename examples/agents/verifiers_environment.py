"""An environment of `verifiers` in a virtual environment: its pins exclude pins of Quadriga.

    python -m venv games && games/bin/pip install verifiers==0.4.0
    VERIFIERS_PYTHON=games/bin/python python examples/agents/verifiers_environment.py [steps]

`verifiers_game.py` has the environment: the game of `guess_number.py`. One process plays all
episodes of a process of agents, because `verifiers` takes seconds to import. Its requests reach
the policy through the endpoint, each with the token of its episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from quadriga.agents.environments import Done
from quadriga.agents.program import Model
from quadriga.errors import ConfigError

GAME = Path(__file__).with_name("verifiers_game.py")


def other_python() -> str:
    """Return the Python that has `verifiers`."""
    if (found := shutil.which(os.environ.get("VERIFIERS_PYTHON", ""))) is None:
        raise ConfigError(
            "VERIFIERS_PYTHON must name the Python of an environment with verifiers, got "
            f"{os.environ.get('VERIFIERS_PYTHON')!r}; run: python -m venv games && "
            "games/bin/pip install verifiers==0.4.0"
        )
    return str(Path(found).absolute())


class Player:
    """The process that plays episodes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.begun = process, 0
        self.waiting: dict[int, asyncio.Future[dict]] = {}
        self.reading = asyncio.create_task(self.read())

    @classmethod
    async def start(cls) -> Player:
        return cls(
            await asyncio.create_subprocess_exec(
                other_python(), "-E", str(GAME), GAME.stem,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )
        )  # fmt: skip

    async def read(self) -> None:
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            asked = self.waiting.pop(answer["id"])
            if not asked.done():  # an episode that has ended at a limit
                asked.set_result(answer)
        player.cache_clear()
        for asked in self.waiting.values():
            if not asked.done():
                asked.set_exception(RuntimeError(f"{GAME.name} has ended, see its output"))

    async def play(self, **episode: object) -> dict:
        self.begun += 1
        asked = self.waiting[self.begun] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps({"id": self.begun, **episode}).encode() + b"\n")
        await self.process.stdin.drain()
        return await asked


@cache
def player() -> asyncio.Task[Player]:
    """Return the player of this process, which starts with the first call."""
    return asyncio.create_task(Player.start())


async def rollout(model: Model, row: Mapping[str, object]) -> Done:
    """Play one game."""
    data = {"prompt": row["prompt"], "number": row["number"]}
    own = await asyncio.shield(player())
    answer = await own.play(
        base_url=model.base_url, api_key=model.api_key, model=model.name, row=data
    )
    if answer["error"]:
        raise RuntimeError(answer["error"])
    return Done(answer["reward"], {"won": float(answer["reward"] > 0)})


def main(steps: int = 20) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps, with validations around them."""
    import quadriga

    other_python()
    sys.path.insert(0, str(Path(__file__).parent))
    from guess_number import PROMPT, TURNS, first_policy

    folder = Path(tempfile.mkdtemp(prefix="verifiers-"))
    numbers = [{"prompt": PROMPT, "number": 1 + i % 9} for i in range(144)]
    run = quadriga.GRPO(
        str(first_policy(folder)), data=numbers, val_data=numbers[:72], steps=steps, lr=2e-3,
        batch_size=12, responses=8, mini_batch_size=6, max_response_length=48, slice_tokens=4,
        agent={"path": __file__, "name": "rollout", "max_turns": TURNS, "max_turn_tokens": 4,
               "processes": 1, "step_timeout_s": 600},
        test_freq=steps, folder=str(folder / "run"), loggers=["jsonl"],
        **{"actor_rollout_ref.rollout.val_sampling.temperature": 1.0},
    ).train()  # fmt: skip
    return [*run.history]


if __name__ == "__main__":
    shown = ("step", "val/score", "agent/won", "agent/turns/mean", "agent/raised")
    for row in main(*map(int, sys.argv[1:])):
        print({key: row[key] for key in shown if key in row})
