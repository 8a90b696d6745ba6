"""A text game of several turns: guess a number from 1 to 9, in at most six turns.

    python examples/agents/guess_number.py [steps] [estimator]

A tiny model first learns the form of the game from random games, and then to play it. A guess is
right (reward 1), or too small or too large (reward -0.1). `gigpo` compares the guesses that follow
the same answer; `grpo` compares whole games. Prints the share of games that end with the right
guess, and the guesses that they need.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from quadriga.agents.environments import Action, Done, Observation

TURNS = 6
PROMPT = "Guess a number from 1 to 9."


class Environment:
    """One game."""

    def reset(self, row: dict[str, object]) -> None:
        self.number = row["number"]

    def step(self, action: Action) -> Observation | Done:
        guess = action.text.strip()
        if guess == str(self.number):
            return Done(reward=1.0, metrics={"won": 1})
        if not guess.isdigit():
            return Observation("a number please", reward=-0.2)
        return Observation("larger" if int(guess) < self.number else "smaller", reward=-0.1)


def random_game(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a game with random guesses, as a conversation."""
    number, messages = rng.randint(1, 9), [{"role": "user", "content": PROMPT}]
    for _ in range(TURNS):
        guess = rng.randint(1, 9)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        answer = "larger" if guess < number else "smaller"
        messages.append({"role": "user", "content": answer})
    while messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}


def first_policy(folder: Path) -> Path:
    """Write a tiny model that knows the form of the game, and return its folder."""
    import quadriga
    from quadriga.models.tiny import TinyModel, write_tiny_model

    rng = random.Random(0)
    games = [random_game(rng) for _ in range(1024)]
    shape = TinyModel(hidden_size=96, num_heads=4, num_kv_heads=2, intermediate_size=256)
    texts = [PROMPT, "larger", "smaller", "a number please", "1 2 3 4 5 6 7 8 9"]
    write_tiny_model(folder / "model", texts, shape)
    sft = quadriga.SFT(
        str(folder / "model"), games, lr=3e-3, steps=60, batch_size=64, folder=str(folder / "sft"),
        messages_key="messages", loggers=["jsonl"], test_freq=0,
    ).train()  # fmt: skip
    return Path(str(sft.model_path))


def main(steps: int = 60, estimator: str = "gigpo") -> list[dict[str, float]]:
    """Train, and return the metrics of the validations."""
    import quadriga

    folder = Path(tempfile.mkdtemp(prefix="guess-"))
    numbers = [{"prompt": PROMPT, "number": 1 + i % 9} for i in range(144)]
    run = quadriga.GRPO(
        str(first_policy(folder)), data=numbers, val_data=numbers[:90], steps=steps, lr=2e-3,
        batch_size=18, responses=8, mini_batch_size=6, adv_estimator=estimator,
        agent={"path": __file__, "max_turns": TURNS, "max_turn_tokens": 4},
        max_response_length=48, slice_tokens=4, folder=str(folder / "run"), test_freq=10,
        loggers=["jsonl"], **{"actor_rollout_ref.rollout.val_sampling.temperature": 1.0},
    ).train()  # fmt: skip
    return [row for row in run.history if "val/score" in row]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    for row in main(*map(int, arguments[:1]), *arguments[1:]):
        print({key: row[key] for key in ("step", "val/score") if key in row})
