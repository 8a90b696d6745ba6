"""The counts of updates of each parameter, and learning rates by hand."""

import json

import pytest
import torch
from torch import nn

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers import (
    AdamW,
    ShardedOptimizer,
    learning_rate,
)

CPU = torch.device("cpu")


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_parameter_whose_first_gradient_comes_after_a_resume_is_updated_as_without_one():
    """AdamW divides by 1 − β^n, and n is 1 at the first gradient of a parameter."""
    early, late = random(64, 128, seed=1).float(), random(64, 128, seed=2).float()

    def start(first, second):
        named = [("early", nn.Parameter(first.clone())), ("late", nn.Parameter(second.clone()))]
        config = OptimConfig(lr=0.1)
        optimizer = ShardedOptimizer(
            [AdamW(named, config)], config, None, shard_group=None, device=CPU
        )
        return optimizer, dict(named)

    def step(optimizer, weights, number):
        weights["early"].grad = random(64, 128, seed=number).float()
        if number > 2:
            weights["late"].grad = random(64, 128, seed=-number).float()
        optimizer.step()

    whole, expected = start(early, late)
    for number in (1, 2):
        step(whole, expected, number)
    resumed, weights = start(expected["early"].detach(), expected["late"].detach())
    scalars = json.loads(json.dumps(whole.scalars()))
    assert scalars["updates"] == {"late": 0}
    state = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    resumed.load(state, scalars)
    for number in (3, 4):
        step(whole, expected, number)
        step(resumed, weights, number)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert resumed.scalars() == whole.scalars() and whole.scalars()["updates"] == {"late": 2}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1.0] * 7),
        ({"lr_warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_scheduler": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]),
        (
            {"lr_scheduler": "linear", "lr_warmup_steps": 1, "min_lr_ratio": 0.2},
            [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        ({"lr_scheduler": "cosine"}, [1.0, 0.90451, 0.65451, 0.34549, 0.09549, 0.0, 0.0]),
    ],
)
def test_learning_rates(settings, expected):
    rates = [learning_rate(step, OptimConfig(lr=1.0, **settings), 6) for step in range(7)]
    assert rates == pytest.approx(expected, abs=1e-5)
