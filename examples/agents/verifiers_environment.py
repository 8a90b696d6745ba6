"""An environment of `verifiers`, `verifiers_game.py`, in a Python of its own: its pins exclude pins
of Quadriga. Its requests reach the policy through the endpoint, with the token of their episode.

    python -m venv games && games/bin/pip install verifiers==0.4.0
    VERIFIERS_PYTHON=games/bin/python python examples/agents/verifiers_environment.py [steps]
"""

import asyncio
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

from quadriga.agents.environments import Done
from quadriga.agents.program import Model


async def start() -> str:
    path = tempfile.mkdtemp(prefix="game-") + "/socket"
    words = os.environ["VERIFIERS_PYTHON"], Path(__file__).with_name("verifiers_game.py"), path
    start.process = await asyncio.create_subprocess_exec(*words, stdin=-1, stdout=-1)
    if await start.process.stdout.readline() != b"ready\n":
        raise RuntimeError("verifiers_game.py has ended, see its output")
    return path


started = cache(lambda: asyncio.create_task(start()))


async def rollout(model: Model, row: dict) -> Done:
    reader, writer = await asyncio.open_unix_connection(await asyncio.shield(started()))
    data = {"id": str(row["number"]), "prompt": [{"role": "user", "content": row["prompt"]}]}
    asked = {"url": model.base_url, "key": model.api_key, "data": data}
    writer.write(json.dumps(asked).encode() + b"\n")
    answer = json.loads(await reader.readline())
    if answer["errors"]:
        raise RuntimeError(answer["errors"][0])
    return Done(answer["reward"], {"won": answer["reward"]})


def main(steps: int = 20) -> list[dict[str, float]]:
    sys.path.insert(0, str(Path(__file__).parent))
    import guess_number

    return guess_number.main(steps, "grpo", path=__file__, name="rollout", step_timeout_s=600)


if __name__ == "__main__":
    for row in main(*map(int, sys.argv[1:])):
        print({key: row[key] for key in ("step", "agent/won", "agent/turns/mean", "agent/raised")})
