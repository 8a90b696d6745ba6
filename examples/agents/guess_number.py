"""A text game of several turns: guess a number from 1 to 9, in at most six turns.

    python examples/agents/guess_number.py [steps] [estimator] [seed]

The answer to a wrong guess tells which numbers are left, such as "3 to 7". A turn is rewarded with
the bits that it has gained, log2(numbers left before / after), a guess that earlier answers exclude
with -1, the right guess with 1 more. A tiny model first learns the form of the game from games in
which half of the guesses are random, and then to play it. `gigpo` with gamma=0 compares the reward
of a guess with that of other guesses that follow the same answer; `grpo` compares whole games.
Prints the mean reward of the games of each step.
"""

from __future__ import annotations

import math
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
        self.number, self.low, self.high = int(str(row["number"])), 1, 9

    def step(self, action: Action) -> Observation | Done:
        left, guess = 1 + self.high - self.low, action.text.strip()
        if guess == str(self.number):
            return Done(reward=1 + math.log2(left), metrics={"won": 1})
        reward = -1.0
        if guess.isdigit() and self.low <= int(guess) <= self.high:
            if int(guess) < self.number:
                self.low = int(guess) + 1
            else:
                self.high = int(guess) - 1
            reward = math.log2(left / (1 + self.high - self.low))
        return Observation(f"{self.low} to {self.high}", reward, {"excluded": float(reward < 0)})


def first_game(rng: random.Random) -> dict[str, list[dict[str, str]]]:
    """Return a game, as a conversation. Half of its guesses are random, the others are possible."""
    number, messages = rng.randint(1, 9), [{"role": "user", "content": PROMPT}]
    game = Environment()
    game.reset({"number": number})
    for turn in range(1, TURNS + 1):
        bounds = (1, 9) if rng.random() < 0.5 else (game.low, game.high)
        guess = str(rng.randint(*bounds))
        messages.append({"role": "assistant", "content": guess})
        answer = game.step(Action(guess, turn))
        if isinstance(answer, Done) or turn == TURNS:
            break
        messages.append({"role": "user", "content": str(answer.messages)})
    return {"messages": messages}


def first_policy(folder: Path) -> Path:
    """Write a tiny model that knows the form of the game, and return its folder."""
    import quadriga
    from quadriga.models.tiny import TinyModel, write_tiny_model

    rng = random.Random(0)
    games = [first_game(rng) for _ in range(2048)]
    shape = TinyModel(hidden_size=96, num_heads=4, num_kv_heads=2, intermediate_size=256)
    texts = [PROMPT, "1 to 9", "1 2 3 4 5 6 7 8 9"]
    write_tiny_model(folder / "model", texts, shape)
    sft = quadriga.SFT(
        str(folder / "model"), games, lr=3e-3, steps=120, batch_size=64, folder=str(folder / "sft"),
        messages_key="messages", loggers=["jsonl"], test_freq=0,
    ).train()  # fmt: skip
    return Path(str(sft.model_path))


def main(
    steps: int = 12, estimator: str = "gigpo", seed: int = 0, **agent: object
) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps. `agent`: settings of another environment."""
    import quadriga

    folder = Path(tempfile.mkdtemp(prefix="guess-"))
    numbers = [{"prompt": PROMPT, "number": 1 + i % 9} for i in range(144)]
    run = quadriga.GRPO(
        str(first_policy(folder)), data=numbers, steps=steps, lr=2e-3, seed=seed,
        batch_size=6, responses=8, mini_batch_size=6, adv_estimator=estimator, gamma=0.0,
        agent={"path": __file__, "max_turns": TURNS, "max_turn_tokens": 2, "processes": 1, **agent},
        max_response_length=48, slice_tokens=2, folder=str(folder / "run"), test_freq=0,
        loggers=["jsonl"],
    ).train()  # fmt: skip
    rows = [row for row in run.history if "agent/won" in row]
    for row in rows:
        row["reward"] = sum(row.get(f"agent/reward/turn_{k}", 0.0) for k in range(1, TURNS + 1))
    return rows


if __name__ == "__main__":
    arguments = sys.argv[1:]
    numbers = [int(text) for text in arguments[:1] + arguments[2:]]
    for row in main(*numbers[:1], *arguments[1:2], *numbers[1:]):
        print({key: row[key] for key in ("step", "reward", "agent/won")})
