"""An agent that is a program of its own: it knows the `openai` package and nothing of Quadriga.

    python examples/agents/openai_program.py [steps]

The program (`AGENT`) plays the game of `guess_number.py` through the endpoint of the policy: it is
started once for each episode, asks for guesses, and prints whether it has won. Its conversation is
what the policy is trained on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from quadriga.agents.environments import Done
from quadriga.agents.program import Model

AGENT = """
import sys
import openai

client, number, left = openai.OpenAI(timeout=600), sys.argv[1], "123456789"
messages = [{"role": "user", "content": "Guess a number from 1 to 9."}]
for turn in range(1, 7):
    reply = client.chat.completions.create(model="policy", messages=messages)
    guess = (reply.choices[0].message.content or "").strip()
    if guess == number:
        print(1.0 - 0.1 * turn)
        break
    left = [n for n in left if (n < guess) == (number < guess) and n != guess]
    answer = {"role": "user", "content": f"{left[0]} to {left[-1]}"}
    messages += [reply.choices[0].message, answer]
else:
    print(0.0)
"""


async def rollout(model: Model, row: Mapping[str, object]) -> Done:
    """Play one game in a process of its own."""
    own = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": model.api_key}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(row["number"]),
        env={**os.environ, **own}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the agent has ended with exit code {process.returncode}")
    reward = float(out)
    return Done(reward, {"won": float(reward > 0)})


def main(steps: int = 20) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps."""
    sys.path.insert(0, str(Path(__file__).parent))
    import guess_number

    own = {"path": __file__, "name": "rollout", "concurrency": 8, "step_timeout_s": 300}
    return guess_number.main(steps, "grpo", **own)


if __name__ == "__main__":
    for row in main(*map(int, sys.argv[1:])):
        print({key: row[key] for key in ("step", "agent/won", "agent/turns/mean")})
