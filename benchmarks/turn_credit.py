"""Credit by turn and by game, in the game of `examples/agents/guess_number.py`, without a model.

    python benchmarks/turn_credit.py [seeds]          # a minute

The policy is a table: for each interval that is left, a logit for each guess. It begins as the
games of the example's warm start are, and is trained with the advantages of `gigpo` (gamma=0) and
of `grpo` on the games that it has just played, 6 prompts × 8 games a step, by Adam. Prints the mean
reward of a game in five steps each, over the seeds, with the lowest and the highest.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from statistics import mean

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "agents"))
from guess_number import TURNS, Action, Done, Environment

from quadriga.algorithms.advantages import gigpo, grpo
from quadriga.algorithms.tensors import Groups

PROMPTS, GAMES, STEPS = 6, 8, 30
Turn = tuple[tuple[int, int], int, float]
"""The interval that is left, the guess, its reward."""


def first_table() -> torch.Tensor:
    """Return logits by low, high and guess: half of the guesses are random."""
    table = torch.zeros(10, 10, 9)
    for low in range(1, 10):
        for high in range(low, 10):
            shares = torch.full((9,), 0.5 / 9)
            shares[low - 1 : high] += 0.5 / (high - low + 1)
            table[low, high] = shares.log()
    return table


def play(table: torch.Tensor, number: int, generator: torch.Generator) -> list[Turn]:
    """Play one game."""
    game, turns = Environment(), list[Turn]()
    game.reset({"number": number})
    while len(turns) < TURNS:
        left = game.low, game.high
        guess = 1 + int(torch.multinomial(table[left].softmax(-1), 1, generator=generator))
        answer = game.step(Action(str(guess), len(turns) + 1))
        turns.append((left, guess, answer.reward))
        if isinstance(answer, Done):
            break
    return turns


def advantages(games: list[list[Turn]], estimator: str) -> torch.Tensor:
    """Return the advantages of all tokens. A guess is one token and an answer two, so the columns
    0, 3, 6, … are guesses."""
    ids, mask, rewards = (torch.zeros(len(games), 3 * TURNS) for _ in range(3))
    for i, game in enumerate(games):
        for k, ((low, high), guess, reward) in enumerate(game):
            ids[i, 3 * k], mask[i, 3 * k], rewards[i, 3 * k] = guess, 1, reward
            if k:
                ids[i, 3 * k - 2], ids[i, 3 * k - 1] = 10 + low, 20 + high
    every = torch.ones(len(games), dtype=torch.bool)
    groups = Groups(torch.arange(len(games)) // GAMES, every, PROMPTS)
    if estimator == "gigpo":
        return gigpo(rewards, mask, ids.long(), groups, gamma=0.0)[0]
    return grpo(rewards, mask, groups)[0]


def train(estimator: str, seed: int) -> list[float]:
    """Return the mean reward of a game in each step."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    table, means = first_table().requires_grad_(), list[float]()
    optimizer = torch.optim.Adam([table], lr=0.1)
    for _ in range(STEPS):
        numbers = [rng.randint(1, 9) for _ in range(PROMPTS)]
        games = [play(table.detach(), n, generator) for n in numbers for _ in range(GAMES)]
        means.append(mean(sum(reward for *_, reward in game) for game in games))
        found = advantages(games, estimator)
        turns = [(i, k, *turn) for i, game in enumerate(games) for k, turn in enumerate(game)]
        low, high, guess = torch.tensor([(*left, guess - 1) for *_, left, guess, _ in turns]).T
        chosen = table[low, high].log_softmax(-1)[torch.arange(len(turns)), guess]
        own = found[[i for i, *_ in turns], [3 * k for _, k, *_ in turns]]
        optimizer.zero_grad()
        (-own * chosen).mean().backward()
        optimizer.step()
    return means


def main(seeds: int = 6) -> None:
    """Print the rewards of both estimators."""
    for estimator in ("gigpo", "grpo"):
        runs = [train(estimator, seed) for seed in range(seeds)]
        for first in range(0, STEPS, 5):
            own = [mean(run[first : first + 5]) for run in runs]
            steps = f"steps {first + 1}-{first + 5}"
            print(f"{estimator} {steps}: {mean(own):.2f} ({min(own):.2f} to {max(own):.2f})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
