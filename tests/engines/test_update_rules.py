"""The formulas of the update rules against independent references, and learning rates by hand."""

import json
import math

import pytest
import torch
from torch import nn

from quadriga.config.schema import OptimConfig
from quadriga.engines.optimizers import (
    AdamW,
    Muon,
    ShardedOptimizer,
    learning_rate,
    newton_schulz,
)

CPU = torch.device("cpu")
SHAPES = [(6, 4), (4, 6), (5, 5), (3, 4, 6)]


def orthogonal(matrix):
    """Apply the quintic polynomial to the singular values, five times."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / matrix.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_moves_singular_values(shape):
    matrices = random(*shape)
    found = newton_schulz(matrices)
    for one, matrix in zip(
        found.view(-1, *shape[-2:]), matrices.view(-1, *shape[-2:]), strict=True
    ):
        assert torch.allclose(one, orthogonal(matrix), atol=1e-10)
    wide = newton_schulz(random(8, 64))
    assert all(0.6 < value < 1.3 for value in torch.linalg.svdvals(wide).tolist())


def naive_muon(weight, gradients, *, lr, momentum, decay):
    """Return the weight after one update for each gradient, one matrix at a time."""
    if weight.dim() == 3:
        each = [(w, [g[e] for g in gradients]) for e, w in enumerate(weight)]
        return torch.stack(
            [naive_muon(w, g, lr=lr, momentum=momentum, decay=decay) for w, g in each]
        )
    moment = torch.zeros_like(weight)
    for gradient in gradients:
        moment = momentum * moment + (1 - momentum) * gradient
        direction = orthogonal((1 - momentum) * gradient + momentum * moment)
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight - lr * decay * weight - lr * scale * direction
    return weight


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [None, 0.8])
def test_muon_equals_the_formula(shape, momentum):
    config = OptimConfig(name="muon", lr=0.1, weight_decay=0.2, momentum=momentum)
    parameter = nn.Parameter(random(*shape))
    gradients = [random(*shape, seed=seed) for seed in (1, 2, 3)]
    expected = naive_muon(
        parameter.detach(), gradients, lr=0.1, momentum=momentum or 0.95, decay=0.2
    )
    rule = Muon([("w", parameter)], config, shard_group=None, device=CPU)
    for gradient in gradients:
        rule.update([gradient], 0.1)
    assert torch.allclose(parameter, expected, atol=1e-10)


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
