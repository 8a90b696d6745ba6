"""Simulate the slowest of 8 ranks: single sequences balanced against whole prompt groups.

    python benchmarks/group_balance.py --out result.json
    python benchmarks/group_balance.py --quick          # one batch per case

A case has 64 prompts × 8 responses with lognormal lengths (median and standard deviation of the
logarithm below), in one and in four mini-batches. Nothing is computed: a rank's tokens and cost are
counted as the packed forward pass computes them, a shared prompt once for each rank and mini-batch.
All ranks wait for the slowest one at each optimizer step, so a figure is the sum over the
mini-batches of the largest rank. Three orders are compared:

- rows: single sequences balanced over the whole batch by length, as before groups were balanced;
- groups: whole prompt groups balanced in each mini-batch by cost;
- groups of the batch: the same over the whole batch, which leaves mini-batches uneven.

Cost is that of a model with the shape of Qwen2.5-1.5B. Figures are medians over batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quadriga.parallel.balancing import RowCosts, arrange_rows, get_seqlen_balanced_partitions
from quadriga.parallel.costs import TOKENS, CostModel, ModelShape

RANKS, PROMPTS, SAMPLES = 8, 64, 8
MINI_BATCHES = (1, 4)
SIGMA = 0.6  # standard deviation of the logarithm of a length
SHAPE = ModelShape(
    hidden_size=1536, attention_size=1536, key_value_size=256, mlp_size=8960, vocabulary=151936,
    windows=(None,) * 28,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Median tokens of prompts and responses, and the goal: tokens of rows / tokens of groups."""

    prompt: int
    response: int
    goal: float


CASES = (Case(512, 80, 2.5), Case(1024, 512, 1.5))
Ranks = list[list[list[int]]]
"""Rows by rank and mini-batch."""


def draw(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the group, prompt tokens and response tokens of each row."""
    random = np.random.default_rng(seed)
    group = np.repeat(np.arange(PROMPTS), SAMPLES)
    prompt = case.prompt * random.lognormal(0, SIGMA, PROMPTS)
    response = case.response * random.lognormal(0, SIGMA, PROMPTS * SAMPLES)
    return group, np.maximum(prompt, 1).astype(np.int64)[group], np.maximum(response, 1).astype(int)


def balanced_rows(lengths: np.ndarray, minis: int) -> Ranks:
    """Balance sequences over the whole batch by length; a rank cuts its rows into mini-batches."""
    parts = get_seqlen_balanced_partitions(lengths, RANKS, equal_size=True)
    return [[block.tolist() for block in np.array_split(part, minis)] for part in parts]


def balanced_batch(costs: RowCosts, minis: int) -> Ranks:
    """Balance whole groups over the whole batch; a rank cuts its rows into mini-batches."""
    ranks = arrange_rows(costs, RANKS, None)
    return [[b.tolist() for b in np.array_split(rank[0], minis)] for rank in ranks]


def slowest(ranks: Ranks, costs: RowCosts) -> float:
    """Return the sum over the mini-batches of the largest rank."""
    blocks = np.array([[costs.total(block) for block in rank] for rank in ranks])
    return float(blocks.max(0).sum())


def measure(case: Case, minis: int, seed: int) -> dict[str, float]:
    """Return the ratios of one batch: above 1, whole groups in each mini-batch are faster."""
    group, prompt, response = draw(case, seed)
    tokens = RowCosts.of(TOKENS, group, prompt, response)
    costs = RowCosts.of(CostModel.of_shape(SHAPE), group, prompt, response)
    orders = {
        "rows": balanced_rows(prompt + response, minis),
        "groups": arrange_rows(costs, RANKS, PROMPTS * SAMPLES // minis),
        "groups_of_batch": balanced_batch(costs, minis),
    }
    found: dict[str, float] = {}
    for name, measured in (("tokens", tokens), ("cost", costs)):
        figures = {order: slowest(ranks, measured) for order, ranks in orders.items()}
        found[f"{name}_rows"], found[f"{name}_groups"] = figures["rows"], figures["groups"]
        found[f"{name}_ratio"] = figures["rows"] / figures["groups"]
        found[f"{name}_gain_per_mini_batch"] = figures["groups_of_batch"] / figures["groups"]
    blocks = np.array([[costs.total(block) for block in rank] for rank in orders["groups"]])
    found["cost_imbalance"] = float(blocks.max(0).sum() / blocks.mean(0).sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one batch per case")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    cases: dict[str, dict[str, float]] = {}
    goals: dict[str, dict[str, float | bool]] = {}
    for case, minis in itertools.product(CASES, MINI_BATCHES):
        name = f"prompt {case.prompt}, response {case.response}, {minis} mini-batches"
        runs = [measure(case, minis, seed) for seed in range(1 if options.quick else 20)]
        cases[name] = {
            key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]
        }
        value = cases[name]["tokens_ratio"]
        goals[f"{name}: heaviest rank's tokens, rows / groups"] = {
            "value": value, "goal": case.goal, "met": value >= case.goal,
        }  # fmt: skip
    text = json.dumps({"goals": goals, "cases": cases}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
